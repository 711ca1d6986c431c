"""The fallback that makes an installation without a compiler work must not hide a compile error."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def checker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_native", ROOT / "tools" / "check_native.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_native_is_built_where_a_compiler_exists(checker: ModuleType) -> None:
    compiler = checker.find_compiler()
    if compiler is None:
        pytest.skip("no C++20 compiler on this machine")
    assert checker.judge(compiler, checker.import_native(), checker.libgomp_copies(), []) == []


def test_planted_missing_module_is_a_complaint(checker: ModuleType) -> None:
    reason = checker.import_native("kvist._no_such_native")
    assert reason is not None
    assert "_no_such_native" in reason
    assert len(checker.judge("c++", reason, [], [])) == 1
    assert checker.judge(None, reason, [], []) == []


def test_compiler_that_does_not_compile_is_no_compiler(checker: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    assert checker.find_compiler() is None
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert checker.find_compiler() is None


def test_planted_second_libgomp_is_a_complaint(checker: ModuleType, tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 fe:00 1 "
    maps.write_text(
        f"{line}/a/libgomp.so.1\n{line}/a/libgomp.so.1\n{line}/b/libgomp-a1b2.so.1.0.0\n{line}/c/libm.so.6\n"
    )
    copies = checker.libgomp_copies(maps)
    assert copies == ["/a/libgomp.so.1", "/b/libgomp-a1b2.so.1.0.0"]
    assert len(checker.judge("c++", None, copies, [])) == 1
    assert checker.judge("c++", None, copies[:1], []) == []


def test_planted_symbol_shared_between_instruction_sets_is_seen(checker: ModuleType, tmp_path: Path) -> None:
    compiler = checker.find_compiler()
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("needs a compiler and nm")
    source = tmp_path / "kernels.cpp"
    source.write_text(
        "struct Shared { int v; __attribute__((noinline, noclone)) int square() { return v * v; } };\n"
        "namespace avx2 {\n"
        "struct Own { int v; __attribute__((noinline, noclone)) int square() { return v * v; } };\n"
        "int both(int n) { return Shared{n}.square() + Own{n}.square(); }\n"
        "}\n"
    )
    folder = tmp_path / "kernels_avx2.dir"
    folder.mkdir()
    target = folder / "kernels.cpp.o"
    subprocess.run([*compiler.split(), "-O2", "-c", source, "-o", target], check=True)
    assert checker.leaking_symbols([target]) == ["kernels.cpp.o (avx2): Shared::square()"]
