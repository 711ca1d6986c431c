"""tools/fuzz.py finds what it is there to find: tried on planted faults, and its own seeds are readable."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvist.base.errors import BadValue

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz() -> Iterator[ModuleType]:
    found = importlib.util.spec_from_file_location("fuzz", ROOT / "tools" / "fuzz.py")
    assert found is not None and found.loader is not None
    tool = importlib.util.module_from_spec(found)
    sys.modules["fuzz"] = tool  # its records look their module up
    before = list(sys.path)
    found.loader.exec_module(tool)
    yield tool
    sys.path[:] = before
    del sys.modules["fuzz"]


@pytest.mark.parametrize("name", ["config", "vocabulary", "safetensors", "folder"])
def test_seeds_are_read_and_their_changes_cause_no_finding(fuzz: ModuleType, tmp_path: Path, name: str) -> None:
    target = fuzz.targets(tmp_path)[name]()
    draw = random.Random(1)
    for seed in target.seeds:
        assert fuzz.run_one(target, seed) is None
    for _ in range(60):
        changed = target.change(draw, draw.choice(target.seeds), draw.choice(target.seeds))
        assert fuzz.run_one(target, changed) is None, changed


def test_a_header_taken_apart_is_the_same_when_put_together(fuzz: ModuleType, tmp_path: Path) -> None:
    for seed in fuzz.targets(tmp_path)["vocabulary"]().seeds:
        assert fuzz.Header.read(seed).write() == seed


def test_a_planted_fault_is_found_behind_a_branch(fuzz: ModuleType, tmp_path: Path) -> None:
    """Refusals by name are none, and what is found is kept."""

    def read(data: bytes) -> None:
        if data.startswith(b"{") and b"null" in data:
            raise ZeroDivisionError
        raise BadValue("not this one")

    target = fuzz.Target("planted", read, [b'{"a": 1, "b": 2}'], fuzz.change_json)
    assert fuzz.fuzz(target, 2.0, 0, tmp_path) == 1
    assert b"null" in (tmp_path / "planted-1").read_bytes()
    silent = fuzz.Target("silent", lambda data: (_ for _ in ()).throw(BadValue("")), [b"x"], fuzz.change_bytes)
    assert fuzz.run_one(silent, b"x") == "an error without words"
