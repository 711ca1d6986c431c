"""Build the native kernels with sanitizers and exercise every operation of every variant that this machine runs.

Two builds, in ``build/sanitize``: address and undefined behaviour, then threads. Each is first tried on planted faults,
which it must find. Variants and their flags are read from CMakeLists.txt, so that there is one list of them.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from check_native import find_compiler

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "sanitize"
PLAIN = ("-std=c++20", "-O1", "-g1", "-fno-omit-frame-pointer", "-ffp-contract=off", "-fno-math-errno", "-Icsrc")
# (name, flags, mode of the driver, planted faults that it must find, environment)
SANITIZERS = (
    (
        "address",
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fopenmp"),
        ("program", "team"),
        ("short", "crooked"),
        {"ASAN_OPTIONS": "detect_stack_use_after_return=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    ),
    # The team of this build is the driver's own threads: libgomp is not instrumented, so its barriers would be unseen
    # and every run through OpenMP full of races that are none. It is linked for names, its regions never run.
    ("thread", ("-fsanitize=thread", "-fopenmp"), ("team",), ("race",), {"TSAN_OPTIONS": "halt_on_error=1"}),
)
PLANTED_NAMES = {"short": "heap-buffer-overflow", "crooked": "misaligned", "race": "data race"}


def variants() -> dict[str, list[str]]:
    """Every variant of CMakeLists.txt with its flags; those of other architectures left out."""
    text = (ROOT / "CMakeLists.txt").read_text()
    found = re.findall(r"^\s*kvist_add_variant\((\w+)([^)]*)\)", text, re.MULTILINE)
    x86 = platform.machine().lower() in {"x86_64", "amd64"}
    return {name: flags.split() for name, flags in found if x86 or not flags.split()}


def compile_all(compiler: list[str], name: str, flags: tuple[str, ...]) -> Path:
    """The driver of one sanitizer; an object is rebuilt when what it is made of is newer."""
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    common = [*ROOT.glob("csrc/*.h"), ROOT / "CMakeLists.txt", Path(__file__)]
    known = variants()
    have = [f"-DKVIST_HAVE_{variant.upper()}=1" for variant in known]
    sources = [("program", "csrc/program.cpp", have), ("exercise", "tests/native/exercise.cpp", have)]
    for variant, extra in known.items():
        defines = [f"-DKVIST_VARIANT={variant}", f"-DKVIST_VARIANT_{variant.upper()}=1"]
        sources.append((f"kernels_{variant}", "csrc/kernels.cpp", [*defines, *extra]))

    def build(source: tuple[str, str, list[str]]) -> Path:
        target = folder / f"{source[0]}.o"
        newest = max(path.stat().st_mtime for path in [*common, ROOT / source[1]])
        if not target.exists() or target.stat().st_mtime < newest:
            command = [*compiler, *PLAIN, *flags, *source[2], "-c", source[1], "-o", str(target)]
            subprocess.run(command, cwd=ROOT, check=True)
        return target

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(build, sources))
    driver = folder / "exercise"
    subprocess.run([*compiler, *flags, *map(str, objects), "-o", str(driver), "-lpthread"], cwd=ROOT, check=True)
    return driver


def run(driver: Path, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the driver where the address space is laid out as ThreadSanitizer needs it."""
    fixed = ["setarch", platform.machine(), "-R"] if sys.platform == "linux" else []
    command = [*fixed, str(driver), *arguments]
    return subprocess.run(command, env=os.environ | environment, text=True, capture_output=True, check=False)


def main() -> int:
    """0 when no sanitizer complains and every planted fault is found."""
    name = find_compiler()
    if name is None:
        print("sanitize: no C++20 compiler", file=sys.stderr)
        return 1
    chosen = sys.argv[1:]
    failures = 0
    for sanitizer, flags, modes, plants, environment in SANITIZERS:
        if chosen and sanitizer not in chosen:
            continue
        begin = time.perf_counter()
        driver = compile_all(shlex.split(name), sanitizer, flags)
        print(f"sanitize: {sanitizer} built in {time.perf_counter() - begin:.0f} s", flush=True)
        for plant in plants:
            done = run(driver, [modes[-1], plant], environment)
            if done.returncode == 0 or PLANTED_NAMES[plant] not in done.stderr:
                failures += 1
                print(f"sanitize: {sanitizer} did not find the planted fault {plant!r}:\n{done.stderr[-2000:]}")
        for mode in modes:
            begin = time.perf_counter()
            done = run(driver, [mode], environment)
            print(done.stdout, end="")
            if done.returncode:
                failures += 1
                print(f"sanitize: {sanitizer} ({mode}) failed with {done.returncode}:\n{done.stderr[:12000]}")
            else:
                print(f"sanitize: {sanitizer} ({mode}) clean, {time.perf_counter() - begin:.0f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
