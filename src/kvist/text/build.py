"""A vocabulary made into a ``tokenizers.Tokenizer``: where text is split, how it is merged, what stands whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from kvist.base.errors import FormatError
from kvist.spec.gguf_file import GgufFile
from kvist.text.vocabulary import BYTE_LEVEL, SPACE, Vocabulary

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _by_pattern(pattern: str) -> Callable[[], Any]:
    def make() -> Any:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return make


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    """GPT-2's split, after every digit stands alone."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _falcon() -> Any:
    """Runs of punctuation apart, GPT-2's split, then digits (of the byte alphabet) apart and in threes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            _gpt2(),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )


# How text is cut before it is merged, by the name that GGUF writers give it (tokenizer.ggml.pre).
_SPLITS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "olmo": _gpt2,
    "mpt": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "command-r": _single_digits,
    "codeshell": _single_digits,
    "llama3": _by_pattern(_LLAMA3),
    "llama-v3": _by_pattern(_LLAMA3),
    "llama-bpe": _by_pattern(_LLAMA3),
    "falcon3": _by_pattern(_LLAMA3),
    "smaug-bpe": _by_pattern(_LLAMA3),
    "dbrx": _by_pattern(_LLAMA3),
    "falcon": _falcon,
    "gpt-4o": _by_pattern(_O200K),
    "qwen2": _by_pattern(_QWEN2),
    "deepseek-r1-qwen": _by_pattern(_QWEN2),
    "tekken": _by_pattern(_TEKKEN),
}
# A piece of text that is itself a token is taken whole, whatever the merges would make of it.
_WHOLE_PIECES = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"})
# The same names begin a text with BOS when the header does not say (tokenizer.ggml.add_bos_token).
BEGINS_WITH_BOS = _WHOLE_PIECES


def build_tokenizer(gguf: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer that the header of ``gguf`` describes. FormatError when it names an unknown way to split text."""
    if gguf.metadata["tokenizer.ggml.model"] == BYTE_LEVEL:
        tokenizer = _byte_level(gguf, vocabulary)
    else:
        tokenizer = _sentencepiece(gguf, vocabulary)
    spell = vocabulary.tokens.__getitem__
    tokenizer.add_special_tokens([AddedToken(spell(i), normalized=False, special=True) for i in vocabulary.control])
    tokenizer.add_tokens([AddedToken(spell(i), normalized=False, special=False) for i in vocabulary.user_defined])
    return tokenizer


def _byte_level(gguf: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    name = gguf.metadata.get("tokenizer.ggml.pre")
    make = _SPLITS.get(name) if isinstance(name, str) else None
    if make is None:
        raise FormatError(
            f"{gguf.path}: tokenizer.ggml.pre is {name!r}, so where to split text is unknown; known are "
            f"{', '.join(_SPLITS)}. Use the model's safetensors folder with its tokenizer.json instead"
        )
    model = models.BPE(vocab=vocabulary.ids(), merges=vocabulary.merge_pairs(), ignore_merges=name in _WHOLE_PIECES)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = make()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(gguf: GgufFile, vocabulary: Vocabulary) -> Tokenizer:
    unknown = gguf.metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocabulary.ids(),
        merges=vocabulary.merge_pairs(),
        unk_token=vocabulary.tokens[unknown] if isinstance(unknown, int) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = gguf.metadata.get("tokenizer.ggml.add_space_prefix", True)
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer
