"""Text to ids and back: the only place that knows a vocabulary. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Encoder

from kvist.base.errors import Corrupt, FormatError, UsageError
from kvist.spec.gguf_file import GgufFile, read_gguf
from kvist.spec.source import ModelSource, cache_dir
from kvist.text.build import BEGINS_WITH_BOS, build_tokenizer
from kvist.text.chat import ChatTemplate, Message
from kvist.text.spelling import spelling_of
from kvist.text.stream import TextStream
from kvist.text.vocabulary import SENTENCEPIECE
from kvist.text.vocabulary_cache import load_vocabulary

# Special tokens of these names end an answer in every model that has them; files often name only one of theirs.
END_NAMES = (
    *("<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>"),
    *("<eos>", "<EOT>", "<|end_of_turn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)


@dataclass(frozen=True, slots=True)
class _Facts:
    """What files say beside the vocabulary. ``special``: bos_token, eos_token, ... as spelled."""

    where: str
    special: dict[str, str]
    eos_ids: tuple[int, ...]
    adds_bos: bool
    template: str | None


class Tokenizer:
    """A model's vocabulary, special ids and chat template.

    ``vocab_size``: ids the tokenizer knows (a model's matrix may hold more rows). ``eos_token_ids``: every id that ends
    an answer. ``adds_bos``: a text begins with ``bos_token_id``. ``special_ids`` are never printed.
    """

    def __init__(self, encoder: Encoder, facts: _Facts) -> None:
        """Use ``load``, ``from_folder`` or ``from_gguf``."""
        encoder.no_truncation()
        encoder.no_padding()
        self._encoder = encoder
        self._spelling = spelling_of(encoder, facts.where)
        self._added = {index: token.content for index, token in encoder.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self.special_ids = frozenset(i for i, t in encoder.get_added_tokens_decoder().items() if t.special)
        self.vocab_size = encoder.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._id(facts.special.get("bos_token"))
        self.adds_bos = facts.adds_bos and self.bos_token_id is not None
        named = [self._id(facts.special.get("eos_token")), *map(encoder.token_to_id, END_NAMES)]
        ends = {i for i in named if i in self.special_ids} | set(facts.eos_ids)
        self.eos_token_ids = tuple(sorted(ends))
        self._chat = ChatTemplate(facts.template, facts.special) if facts.template else None

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._encoder.token_to_id(token)

    @classmethod
    def load(cls, source: ModelSource) -> Tokenizer:
        """The tokenizer of the model at ``source``.

        Raises FormatError, Corrupt or UsageError when there is none that can be used.
        """
        return cls.from_gguf(read_gguf(source.path)) if source.kind == "gguf" else cls.from_folder(source.path)

    @classmethod
    def from_gguf(cls, gguf: GgufFile, *, cache: bool = True) -> Tokenizer:
        """The tokenizer in a GGUF header; ``cache`` keeps the converted vocabulary in the user's cache folder."""
        data = gguf.metadata
        vocabulary = load_vocabulary(gguf, cache_dir() / "kvist" / "vocabulary" if cache else None)
        special, ends = {}, []
        for name in ("bos", "eos", "unknown", "padding", "eot", "eom"):
            index = data.get(f"tokenizer.ggml.{name}_token_id")
            if index is None:
                continue
            if not isinstance(index, int) or not 0 <= index < len(vocabulary.tokens):
                count = len(vocabulary.tokens)
                raise Corrupt(f"{gguf.path}: tokenizer.ggml.{name}_token_id is {index!r}, but there are {count} tokens")
            if name in ("eos", "eot", "eom"):
                ends.append(index)
            key = {"unknown": "unk", "padding": "pad"}.get(name, name)
            special[f"{key}_token"] = vocabulary.tokens[index]
        split = data.get("tokenizer.ggml.pre")
        begins = data["tokenizer.ggml.model"] == SENTENCEPIECE or (isinstance(split, str) and split in BEGINS_WITH_BOS)
        template = data.get("tokenizer.chat_template")
        facts = _Facts(
            where=str(gguf.path),
            special=special,
            eos_ids=tuple(ends),
            adds_bos=bool(data.get("tokenizer.ggml.add_bos_token", begins)),
            template=template if isinstance(template, str) else None,
        )
        return cls(build_tokenizer(gguf, vocabulary), facts)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a folder with tokenizer.json (and what stands beside it)."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UsageError(
                f"{folder} has no tokenizer.json; save it there: "
                f"AutoTokenizer.from_pretrained(...).save_pretrained({str(folder)!r})"
            )
        try:
            encoder = Encoder.from_file(str(path))
        except Exception as error:  # tokenizers raises plain Exception for every fault of a file
            raise Corrupt(f"{path} is not a tokenizer that can be read: {error}") from error
        config = _json(folder / "tokenizer_config.json")
        special = _special_tokens(_json(folder / "special_tokens_map.json")) | _special_tokens(config)
        begins = config.get("add_bos_token")
        if begins is None:
            # The file's own frame around a text says what stands before it.
            frame = encoder.encode("", add_special_tokens=True).ids
            begins = bool(frame) and frame[0] == encoder.token_to_id(special.get("bos_token", ""))
        ends = _json(folder / "generation_config.json").get("eos_token_id")
        eos_ids = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
        if not all(isinstance(i, int) for i in eos_ids):
            raise FormatError(
                f"{folder / 'generation_config.json'}: eos_token_id is {ends!r}, not an id or a list of ids"
            )
        facts = _Facts(
            where=str(path), special=special, eos_ids=eos_ids, adds_bos=bool(begins), template=_template(folder, config)
        )
        return cls(encoder, facts)

    def encode(self, text: str, add_bos: bool | None = None) -> list[int]:
        """The ids of ``text``; special tokens written out in it are recognised.

        ``add_bos`` None does what the model's files say. A text that brings its own BOS gets no second one.
        Raises UsageError for text that is not Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            half = f"lone surrogate U+{ord(text[error.start]):04X} at index {error.start}"
            raise UsageError(f"the text holds half a character ({half}): it is not Unicode") from None
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        wanted = self.adds_bos if add_bos is None else add_bos
        if wanted and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False) -> str:
        """The text of ``ids``. ``continuation``: it follows other text, so its leading space is kept.

        ``skip_special`` False prints special tokens as they are spelled.
        """
        spell = self.token_bytes if skip_special else self._with_special
        text = b"".join(map(spell, ids)).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._spelling.drop_space and not continuation else text

    def token_bytes(self, token_id: int) -> bytes:
        """What ``token_id`` stands for; b"" for special ids and ids that have no token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = b"" if token_id in self.special_ids else self._with_special(token_id)
            self._bytes[token_id] = found
        return found

    def _with_special(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added.encode("utf-8", errors="replace")  # written as it is, not in the vocabulary's alphabet
        token = self._encoder.id_to_token(token_id) if token_id >= 0 else None
        return b"" if token is None else self._spelling.bytes_of(token)

    def stream(self, stop: Sequence[str] = (), *, continuation: bool = False) -> TextStream:
        """Printable text of one request as its ids arrive; joined it equals ``decode`` up to the first stop string."""
        return TextStream(self.token_bytes, stop, drop_space=self._spelling.drop_space and not continuation)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's files say how a conversation is written; base models' do not."""
        return self._chat is not None

    @property
    def chat_template(self) -> str | None:
        """The template's text."""
        return None if self._chat is None else self._chat.source

    def render_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **values: Any) -> str:
        """The prompt text of a conversation. UsageError without a template, or when it refuses the messages."""
        if self._chat is None:
            raise UsageError(
                "this model has no chat template (a base model continues text, it does not answer); "
                "give it a text to continue instead of a conversation"
            )
        return self._chat.render(messages, add_generation_prompt=add_generation_prompt, **values)

    def encode_chat(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **v: Any) -> list[int]:
        """The ids of a conversation. The template writes BOS itself where the model wants one."""
        return self.encode(self.render_chat(messages, add_generation_prompt=add_generation_prompt, **v), add_bos=False)


def _json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{path} holds {type(value).__name__}, not an object")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and the like as spelled, from either way of writing them."""
    found = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise Corrupt(f"{key} is {text!r}, which is not Unicode: correct the tokenizer's settings") from error
            found[key] = text
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own, or in the tokenizer's settings (one text, or named ones)."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Corrupt(f"{path} is not UTF-8: {error}; download it again") from error
    found = config.get("chat_template") or _json(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise FormatError(f"{folder}: chat_template is {type(found).__name__}, neither a text nor named texts")
    return found or None
