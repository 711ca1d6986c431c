from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from kvist.base.errors import UsageError
from kvist.cli.prompt import read_prompt


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> None:
    monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(data)))


def test_where_a_prompt_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("é\nend\n\n".encode())
    stdin(monkeypatch, b"piped\r\n")
    assert read_prompt("given", None) == "given"  # what is piped in stays unread
    assert read_prompt(None, file) == "é\nend\n"  # one line break is the file's
    assert read_prompt(None, None) == "piped"
    stdin(monkeypatch, b"dash")
    assert read_prompt("-", None) == "dash"
    stdin(monkeypatch, b"dash")
    assert read_prompt(None, Path("-")) == "dash"


def test_a_terminal_is_a_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, b"", Terminal)
    monkeypatch.setattr(sys, "stdout", Terminal(io.BytesIO()))
    assert read_prompt(None, None) is None
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    with pytest.raises(UsageError, match="no prompt"):
        read_prompt(None, None)


def test_what_is_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for data, words in (
        (b"", "stdin is empty"),
        (b"\n", "stdin is empty"),
        (b"ab\xff\xfe", "byte 0xff at offset 2 of 4"),
        ("é".encode("latin-1"), "byte 0xe9 at offset 0 of 1"),
        ("€".encode()[:2], "stdin is not UTF-8"),
    ):
        stdin(monkeypatch, data)
        with pytest.raises(UsageError, match=words):
            read_prompt(None, None)
    with pytest.raises(UsageError, match="the prompt is empty"):
        read_prompt("", None)
    with pytest.raises(UsageError, match="command line is not UTF-8"):
        read_prompt("a\udcff", None)
    with pytest.raises(UsageError, match="were both given"):
        read_prompt("x", tmp_path)
    with pytest.raises(UsageError, match=r"cannot read the prompt from .*: No such file"):
        read_prompt(None, tmp_path / "absent")
    with pytest.raises(UsageError, match="Is a directory"):
        read_prompt(None, tmp_path)
