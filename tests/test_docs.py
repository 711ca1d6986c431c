"""The pages under docs/ and the README are run: a printed line must be what the comment behind it says.

``print(x)  # 1 | 2`` expects one line for each part, in order; an unindented comment alone on its line is one more.
Blocks of one page share their names, like a session.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
EXPECTED = re.compile(r"(?:\bprint\(.*\)  |^)# (.+)$")


def run_page(text: str) -> int:
    """Run every block; how many lines were compared. AssertionError names the first difference."""
    names: dict[str, object] = {"__name__": "page"}
    compared = 0
    for match in BLOCK.finditer(text):
        block = match[1]
        expected = [
            part for line in block.splitlines() if (found := EXPECTED.search(line)) for part in found[1].split(" | ")
        ]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "page", "exec"), names)
        assert printed.getvalue().splitlines() == expected, block
        compared += len(expected)
    return compared


PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if BLOCK.search(path.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_tells_the_truth(page: Path) -> None:
    assert run_page(page.read_text(encoding="utf-8")) > 0


def test_planted_untruth_is_caught() -> None:
    assert run_page("```python\nprint(1)  # 1\nfor i in range(2):\n    print(i)  # 0 | 1\n```\n") == 3
    with pytest.raises(AssertionError):
        run_page("```python\nprint(1)  # 2\n```\n")
    with pytest.raises(AssertionError):
        run_page("```python\nprint(1)\n```\n")
