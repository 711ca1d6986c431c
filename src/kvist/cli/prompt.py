"""Where the prompt comes from: the command line, a file, or stdin. Text is UTF-8 or refused."""

from __future__ import annotations

import sys
from pathlib import Path

from kvist.base.errors import UsageError

STDIN = "-"


def read_prompt(given: str | None, file: Path | None) -> str | None:
    """The prompt as text; None when there is none and someone sits at the terminal (a chat).

    ``given`` "-" and ``file`` "-" are stdin, which is also read when neither is given and something is piped in. One
    line break at the end of a file or of stdin is not part of the prompt. UsageError when the prompt is empty, given
    twice, absent, or not UTF-8.
    """
    if given is not None and file is not None:
        raise UsageError("a prompt and --prompt-file were both given: leave one of them out")
    if given is not None and given != STDIN:
        try:
            given.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(
                "the prompt on the command line is not UTF-8: set a UTF-8 locale or use --prompt-file"
            ) from None
        return _not_empty(given, "the prompt")
    if file is not None and str(file) != STDIN:
        try:
            data = file.read_bytes()
        except OSError as error:
            raise UsageError(f"cannot read the prompt from {file}: {error.strerror or error}") from error
        return _text(data, str(file))
    if given is None and file is None and sys.stdin.isatty():
        if not sys.stdout.isatty():
            raise UsageError("no prompt: give one, or let stdout be the terminal for a chat")
        return None
    return _text(sys.stdin.buffer.read(), "stdin")


def _text(data: bytes, where: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} of {len(data)}; "
            "convert it, for example with iconv -t utf-8"
        ) from None
    return _not_empty(text.removesuffix("\n").removesuffix("\r"), where)


def _not_empty(text: str, where: str) -> str:
    if not text:
        raise UsageError(f"{where} is empty: give the model at least one character to continue from")
    return text
