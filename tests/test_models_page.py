"""docs/models.md is what the rows say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "write_models.py"


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False)


def test_the_page_is_up_to_date() -> None:
    done = check("--check")
    assert done.returncode == 0, done.stderr


def test_a_stale_page_is_noticed(tmp_path: Path) -> None:
    import importlib.util

    found = importlib.util.spec_from_file_location("write_models", TOOL)
    assert found is not None and found.loader is not None
    tool = importlib.util.module_from_spec(found)
    found.loader.exec_module(tool)
    text = tool.page()
    assert "| qwen2 | qwen2 | qwen2 |" in text and "- phimoe:" in text
    assert tool.PAGE.read_text(encoding="utf-8") == text
