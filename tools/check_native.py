"""Is the native part there when it should be, and sound?

An installation without a compiler is complete: it runs on the reference kernels. The rule that makes this work hides
a compile error, so this check fails when a C++20 compiler exists and ``kvist._native`` cannot be imported. It further
fails when the process ends up with two copies of libgomp (two thread pools), and when an object compiled for one
instruction set leaves a symbol that the linker may hand to another one.

``--report`` prints the same findings and never fails: the installation uses it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROBE = "#include <span>\nint main() { return 0; }\n"


def find_compiler() -> str | None:
    """The first command that compiles a C++20 file: $CXX alone when it is set, else the usual names."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        command = shlex.split(name)
        if not command or shutil.which(command[0]) is None:
            continue
        probe = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        if subprocess.run(probe, input=PROBE, text=True, capture_output=True).returncode == 0:
            return name
    return None


def import_native(module: str = "kvist._native") -> str | None:
    """None when ``module`` can be imported after torch, else the reason."""
    try:
        importlib.import_module("torch")
        importlib.import_module(module)
    except ImportError as error:
        return str(error)
    return None


def libgomp_copies(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Different libgomp files mapped into a process; empty where there is no such listing."""
    if not maps.exists():
        return []
    return sorted(set(re.findall(r"/\S*libgomp[^/\s]*", maps.read_text())))


def leaking_symbols(objects: list[Path]) -> list[str]:
    """Weak symbols of variant objects outside the variant's own namespace, as ``object (variant): symbol``.

    An inline or template function compiled with wider instructions is merged by the linker with the same function of
    other files: on an older processor the merged copy is an illegal instruction.
    """
    nm = shutil.which("nm")
    if nm is None:
        return []
    leaks = []
    for path in objects:
        variant = re.search(r"kernels_(\w+)\.dir", str(path))
        if variant is None or variant[1] == "portable":
            continue
        listing = subprocess.run([nm, "-C", "--defined-only", path], text=True, capture_output=True, check=True).stdout
        for line in listing.splitlines():
            kind, symbol = line.split(maxsplit=2)[1:] if re.match(r"[0-9a-f]+ ", line) else ("", "")
            if kind in {"W", "V", "u"} and f"{variant[1]}::" not in symbol and not symbol.startswith("DW.ref"):
                leaks.append(f"{path.name} ({variant[1]}): {symbol}")
    return leaks


def judge(compiler: str | None, missing: str | None, copies: list[str], leaks: list[str]) -> list[str]:
    """Every complaint, empty when all is well."""
    complaints = []
    if compiler and missing:
        complaints.append(
            f"{compiler} works, but kvist._native cannot be imported ({missing}): "
            "see the compile error with pip install -v --no-build-isolation --no-deps -e ."
        )
    if len(copies) > 1:
        complaints.append(f"{len(copies)} copies of libgomp in one process: {', '.join(copies)}")
    complaints += [f"a symbol shared between instruction sets: {leak}" for leak in leaks]
    return complaints


def main(arguments: list[str] | None = None) -> int:
    """Print the findings; 1 when there is a complaint and ``--report`` was not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="print only, never fail")
    options = parser.parse_args(arguments)
    compiler, missing = find_compiler(), import_native()
    objects = [] if missing else sorted(ROOT.glob("build/*/CMakeFiles/kernels_*.dir/**/*.o"))
    complaints = judge(compiler, missing, libgomp_copies(), leaking_symbols(objects))
    if missing:
        reason = "no C++20 compiler" if compiler is None else "the build failed"
        print(f"kvist: native kernels not built ({reason}); the reference kernels will run")
    else:
        print("kvist: native kernels built")
    for complaint in complaints:
        print(f"kvist: {complaint}", file=sys.stderr)
    return 1 if complaints and not options.report else 0


if __name__ == "__main__":
    sys.exit(main())
