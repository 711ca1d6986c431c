"""The vocabulary that a GGUF header carries: tokens, their kinds, and the merges in order.

Byte-level vocabularies list their merges. SentencePiece ones list scores instead, from which the merges follow. Of the
pairs that spell a token only one can ever meet while text is merged, best first: the pair that stands last when the
token itself is merged from its characters. (What happens inside a token's characters before they join does not depend
on the text around them.) Only these are kept: Gemma's 514,906 possible pairs become 236,335, with the same ids for
every text, and the tokenizer loads in half the time.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kvist.base.errors import Corrupt, FormatError
from kvist.spec.gguf_file import GgufFile

TOKENS = "tokenizer.ggml.tokens"
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # values of tokenizer.ggml.model
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # values of tokenizer.ggml.token_type
SPACE = "\u2581"  # how SentencePiece writes a space


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``tokens[id]`` as spelled by the model; ``merges``: pairs of ids, flat, best first.

    ``control`` ids are special (never printed), ``user_defined`` ones stand whole in the text before any merging.
    """

    tokens: tuple[str, ...]
    merges: array[int]
    control: tuple[int, ...]
    user_defined: tuple[int, ...]

    def ids(self) -> dict[str, int]:
        """Spelling to id; the first id where a file spells two tokens alike."""
        ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(ids) < len(self.tokens):
            ids = {token: index for index, token in reversed(list(enumerate(self.tokens)))}
        return ids

    def merge_pairs(self) -> list[tuple[str, str]]:
        """The merges as spelled, best first."""
        spell = self.tokens.__getitem__
        return list(zip(map(spell, self.merges[0::2]), map(spell, self.merges[1::2]), strict=True))


def read_vocabulary(gguf: GgufFile) -> Vocabulary:
    """The vocabulary in the header of ``gguf``.

    Raises FormatError for a kind of tokenizer that is not supported, Corrupt when the header contradicts itself.
    """
    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise FormatError(
            f"{gguf.path}: tokenizer.ggml.model is {kind!r}; supported are {BYTE_LEVEL!r} (byte-level BPE) and "
            f"{SENTENCEPIECE!r} (SentencePiece BPE)"
        )
    tokens = _texts(gguf, TOKENS)
    types = _aligned(gguf, "tokenizer.ggml.token_type", len(tokens)) or [NORMAL] * len(tokens)
    control = tuple(i for i, kind_of in enumerate(types) if kind_of == CONTROL)
    user_defined = [i for i, kind_of in enumerate(types) if kind_of == USER_DEFINED]
    if kind == SENTENCEPIECE:
        # Runs of spaces are stored as typed, but meet the merges as SentencePiece writes them.
        runs = {i for i in user_defined if not tokens[i].strip(" ")}
        tokens = [SPACE * len(token) if i in runs else token for i, token in enumerate(tokens)]
        user_defined = [i for i in user_defined if i not in runs]
    if gguf.count("tokenizer.ggml.merges"):
        merges = _listed(gguf, tokens)
    elif kind == SENTENCEPIECE:
        scores = _aligned(gguf, "tokenizer.ggml.scores", len(tokens))
        if scores is None:
            raise FormatError(f"{gguf.path}: neither tokenizer.ggml.merges nor tokenizer.ggml.scores says how to merge")
        merges = derive_merges(tokens, types, scores)
    else:
        raise FormatError(f"{gguf.path}: a byte-level vocabulary without tokenizer.ggml.merges cannot be used")
    return Vocabulary(tuple(tokens), merges, control, tuple(user_defined))


def _texts(gguf: GgufFile, key: str) -> list[str]:
    """The array ``key``, whose elements must be texts: those of an array are all of one type."""
    values = gguf.array(key)
    if values and not isinstance(values[0], str):
        raise Corrupt(f"{gguf.path}: {key} holds {type(values[0]).__name__}s, not texts; download the file again")
    return values


def _aligned(gguf: GgufFile, key: str, count: int) -> list[float] | None:
    """The array ``key``, one element per token; None when the header has none."""
    if gguf.count(key) is None:
        return None
    values = gguf.array(key)
    if values and not isinstance(values[0], int | float):
        raise Corrupt(f"{gguf.path}: {key} holds {type(values[0]).__name__}s, not numbers; download the file again")
    if len(values) != count:
        raise Corrupt(f"{gguf.path}: {key} has {len(values)} elements for {count} tokens")
    return values


def _listed(gguf: GgufFile, tokens: list[str]) -> array[int]:
    ids = {token: index for index, token in reversed(list(enumerate(tokens)))}
    merges = array("i")
    for merge in _texts(gguf, "tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        try:
            pair = (ids[left], ids[right])
            ids[left + right]
        except KeyError as error:
            raise Corrupt(f"{gguf.path}: merge {merge!r} needs the token {error.args[0]!r}; there is none") from None
        if not space:
            raise Corrupt(f"{gguf.path}: merge {merge!r} is not two tokens with a space between them")
        merges.extend(pair)
    return merges


def derive_merges(tokens: list[str], types: list[float], scores: list[float]) -> array[int]:
    """The merges that ``scores`` (higher first, then the lower id) imply, as flat pairs of ids, best first.

    User-defined tokens come before all others, in order of their ids: SentencePiece takes them whole.
    """
    mergeable = [i for i, kind in enumerate(types) if kind not in (CONTROL, UNKNOWN, BYTE)]
    ordered = sorted(mergeable, key=lambda i: (types[i] != USER_DEFINED, -scores[i], i))
    # The first of two tokens spelled alike has the better rank, and keeps it.
    ranks = {tokens[i]: rank for rank, i in reversed(list(enumerate(ordered)))}
    pairs = []
    for token, rank in ranks.items():
        last = _last_pair(token, ranks) if len(token) > 1 else None
        if last is not None:
            pairs.append((rank, last))
    pairs.sort()
    ids = {tokens[i]: i for i in reversed(ordered)}
    merges = array("i")
    for _, (left, right) in pairs:
        merges.append(ids[left])
        merges.append(ids[right])
    return merges


def _last_pair(token: str, ranks: dict[str, int]) -> tuple[str, str] | None:
    """The two parts that merge into ``token`` when it is merged from its characters; None when it never comes about."""
    parts = list(token)
    if not all(part in ranks for part in parts):
        return None
    find = ranks.get
    while len(parts) > 2:
        best, at = (len(ranks), 0), -1
        for i in range(len(parts) - 1):
            rank = find(parts[i] + parts[i + 1])
            # Of two ways to spell one token the longer left part goes first, as in the published merge lists.
            if rank is not None and (rank, -len(parts[i])) < best:
                best, at = (rank, -len(parts[i])), i
        if at < 0:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
