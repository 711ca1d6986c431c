"""The bytes that a token stands for. Text is always made from these bytes, whole or as it streams, so both agree.

``tokenizers`` decodes lists of tokens; a stream needs one token at a time. On ids that make valid UTF-8 the two are
equal. On bytes that do not, ours prints one U+FFFD per broken character, whatever the vocabulary is.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from kvist.base.errors import FormatError
from kvist.text.vocabulary import SPACE

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Spelling:
    """``byte_level``: tokens spell bytes in GPT-2's alphabet; otherwise they spell text, with ``space`` for a space.

    ``byte_tokens``: <0x0A> stands for that byte. ``drop_space``: the first space of a text is not part of it.
    """

    byte_level: bool
    space: str = SPACE
    byte_tokens: bool = False
    drop_space: bool = False

    def bytes_of(self, token: str) -> bytes:
        """What ``token`` stands for."""
        if self.byte_level:
            alphabet = byte_alphabet()
            try:
                return bytes(alphabet[character] for character in token)
            except KeyError:
                return token.encode("utf-8", errors="replace")
        found = _BYTE_TOKEN.fullmatch(token) if self.byte_tokens else None
        if found:
            return bytes([int(found[1], 16)])
        return token.replace(self.space, " ").encode("utf-8", errors="replace")


@cache
def byte_alphabet() -> dict[str, int]:
    """Character to byte in GPT-2's alphabet: printable Latin-1 stands for itself, the rest in order from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


def spelling_of(tokenizer: Tokenizer, where: str) -> Spelling:
    """How ``tokenizer`` writes text, read from its decoder. FormatError for a decoder that is not understood."""
    if tokenizer.decoder is None:
        raise FormatError(f"{where}: the tokenizer has no decoder, so its ids cannot be made into text")
    state = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    if kinds == ["Metaspace"]:
        first = steps[0].get("prepend_scheme", "always") != "never"
        return Spelling(byte_level=False, space=steps[0]["replacement"], drop_space=first)
    by_kind = dict(zip(kinds, steps, strict=True))
    ordered = [kind for kind in ("Replace", "ByteFallback", "Fuse", "Strip") if kind in by_kind]
    replace, strip = by_kind.get("Replace", {}), by_kind.get("Strip")
    plain = replace.get("content") == " " and isinstance(replace.get("pattern", {}).get("String"), str)
    stripped = strip is None or (strip.get("content"), strip.get("start"), strip.get("stop")) == (" ", 1, 0)
    if kinds == ordered and plain and stripped:
        space = replace["pattern"]["String"]
        return Spelling(False, space, byte_tokens="ByteFallback" in kinds, drop_space=strip is not None)
    raise FormatError(
        f"{where}: the tokenizer's decoder {' + '.join(kinds)} is not understood; known are ByteLevel, Metaspace, and "
        "Replace + ByteFallback + Fuse (+ Strip of one leading space)"
    )
