from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.base.errors import Corrupt, FormatError, UsageError
from kvist.spec.source import resolve
from kvist.text.spelling import Spelling
from kvist.text.tokenizer import Tokenizer

from .conftest import bpe_header, spm_header, write_gguf

ROWS = json.loads((Path(__file__).parents[2] / "data" / "text" / "ids.json").read_text())["rows"]
MODELS = {"gemma3": 1, "smollm2": 2}  # the column of ROWS


@pytest.fixture(scope="module", params=MODELS)
def bundled(request: pytest.FixtureRequest) -> tuple[str, Tokenizer]:
    return request.param, Tokenizer.load(resolve(request.param))


def test_bundled_ids_are_those_of_transformers(bundled: tuple[str, Tokenizer]) -> None:
    name, tokenizer = bundled
    assert len(ROWS) > 80
    for row in ROWS:
        assert tokenizer.encode(row[0], add_bos=False) == row[MODELS[name]], row[0]


def test_bundled_ids_give_their_text_back(bundled: tuple[str, Tokenizer]) -> None:
    name, tokenizer = bundled
    for row in ROWS:
        # SentencePiece writes a space as U+2581: a U+2581 in the text comes back as a space.
        text = row[0].replace("\u2581", " ") if name == "gemma3" else row[0]
        assert tokenizer.decode(tokenizer.encode(row[0], add_bos=False), skip_special=False) == text


def test_bundled_streams_equal_the_whole(bundled: tuple[str, Tokenizer]) -> None:
    name, tokenizer = bundled
    for row in ROWS:
        ids = row[MODELS[name]]
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == tokenizer.decode(ids)


def test_bundled_facts() -> None:
    gemma, smol = (Tokenizer.load(resolve(name)) for name in MODELS)
    assert (gemma.vocab_size, gemma.bos_token_id, gemma.adds_bos, gemma.has_chat_template) == (262144, 2, True, False)
    assert gemma.eos_token_ids == (1, 106)  # <eos>, <end_of_turn>; </s> is an HTML tag there
    assert gemma.encode("Once")[0] == 2 and gemma.encode("<bos>Once") == gemma.encode("Once")
    assert (smol.vocab_size, smol.adds_bos, smol.has_chat_template) == (49152, False, True)
    assert smol.eos_token_ids == (0, 2)
    assert smol.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]


def test_bundled_chat() -> None:
    smol = Tokenizer.load(resolve("smollm2"))
    text = smol.render_chat([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smol.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2


@given(st.lists(st.integers(0, 49151), max_size=12), st.data())
def test_any_ids_stream_as_they_decode(ids: list[int], data: st.DataObject) -> None:
    tokenizer = SMOL
    text = tokenizer.decode(ids)
    stop = tuple(data.draw(st.lists(st.text(alphabet=sorted(set(text)) or "x", min_size=1, max_size=3), max_size=2)))
    stream = tokenizer.stream(stop)
    printed = "".join([*map(stream.push, ids), stream.finish()])
    if stream.stopped_by is None:
        assert printed == text and not any(s in text for s in stop)
    else:
        assert text.startswith(printed + stream.stopped_by)
        assert not any(s in (printed + stream.stopped_by)[:-1] for s in stop)


SMOL = Tokenizer.load(resolve("smollm2"))


def test_sentencepiece(tmp_path: Path, cache_folder: Path) -> None:
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", spm_header()))
    ids = tokenizer.encode("ab c", add_bos=True)
    names = [spm_header()["tokens"][i] for i in ids]
    assert names == ["<s>", "\u2581ab", "\u2581c"]
    assert tokenizer.adds_bos  # a SentencePiece header that does not say
    assert tokenizer.eos_token_ids == (2, 3)
    assert tokenizer.decode(ids) == "ab c" and tokenizer.decode(ids, continuation=True) == " ab c"
    assert tokenizer.decode(tokenizer.encode("é\n\n  a")) == "é\n\n  a"
    assert tokenizer.encode("<0x41>", add_bos=False) != [4 + 0x41]  # a byte's name in a text is no byte
    assert tokenizer.token_bytes(4 + 0x41) == b"A"


def test_no_space_is_added_where_the_header_says_so(tmp_path: Path, cache_folder: Path) -> None:
    header = spm_header(add_space_prefix=False, add_bos_token=False)
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", header))
    ids = tokenizer.encode("ab c")
    assert [header["tokens"][i] for i in ids] == ["ab", "\u2581c"]
    assert tokenizer.decode(ids) == "ab c"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def test_byte_level(tmp_path: Path, cache_folder: Path) -> None:
    header = bpe_header()
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", header))
    ids = tokenizer.encode("abc ab12<think>é")
    assert [header["tokens"][i] for i in ids] == ["abc", "\u0120ab", "1", "2", "<think>", "\u00c3", "\u00a9"]
    assert tokenizer.decode(ids) == "abc ab12<think>é"
    assert tokenizer.eos_token_ids == (0, 1)
    assert not tokenizer.adds_bos
    assert tokenizer.decode([0, *ids[:1], 10**6, -1]) == "abc"
    assert tokenizer.decode([0, *ids[:1]], skip_special=False) == "<|endoftext|>abc"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        # Runs of punctuation stand alone, spaces before them too; digits by three from the left.
        ("falcon", "it's 12345, ok!!", ["it", "'", "s", "Ġ", "123", "45", ",", "Ġok", "!!"]),
        ("falcon", "a 1234567", ["a", "Ġ", "123", "456", "7"]),
        # Contractions keep their quote, digits stand by three, a space joins what follows unless that is a digit.
        ("dbrx", "it's 12345, ok!!", ["it", "'s", "Ġ", "123", "45", ",", "Ġok", "!!"]),
        # A contraction stays with its word, and a word ends where a capital begins.
        ("gpt-4o", "it's 12345, okGo!!", ["it's", "Ġ", "123", "45", ",", "Ġok", "Go", "!!"]),
        ("gpt-4o", "HTTPServer", ["HTTPServer"]),
        ("mpt", "it's 12345, ok", ["it", "'s", "Ġ12345", ",", "Ġok"]),
    ],
)
def test_where_text_is_cut(pre: str, text: str, pieces: list[str]) -> None:
    from kvist.text.build import _SPLITS

    assert [piece for piece, _ in _SPLITS[pre]().pre_tokenize_str(text)] == pieces


def test_a_split_that_is_no_name_is_no_crash(tmp_path: Path, cache_folder: Path) -> None:
    """A SentencePiece vocabulary does not need the field; a list in it was once looked up in a set."""
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", spm_header(pre=[1, 2])))
    assert tokenizer.adds_bos


def test_only_special_tokens_end_an_answer(tmp_path: Path, cache_folder: Path) -> None:
    header = bpe_header(tokens=[*bpe_header()["tokens"], "<|end|>"], token_type=[*bpe_header()["token_type"], 4])
    tokenizer = Tokenizer.from_gguf(write_gguf(tmp_path / "m.gguf", header))
    assert tokenizer.eos_token_ids == (0, 1)
    assert tokenizer.decode(tokenizer.encode("<|end|>")) == "<|end|>"


@pytest.mark.parametrize(
    ("header", "error", "words"),
    [
        (bpe_header(pre="unheard-of"), FormatError, "'unheard-of'.*known are.*smollm"),
        (bpe_header(pre=None), FormatError, "tokenizer.ggml.pre is None"),
        (bpe_header(pre=[1, 2]), FormatError, "tokenizer.ggml.pre is"),
        (bpe_header(model="bert"), FormatError, "tokenizer.ggml.model is 'bert'; supported are"),
        (bpe_header(merges=None), FormatError, "without tokenizer.ggml.merges"),
        (bpe_header(merges=["a b", "b zz"]), Corrupt, "'b zz' needs the token 'zz'"),
        (bpe_header(token_type=[1, 1]), Corrupt, "token_type has 2 elements for"),
        (bpe_header(eos_token_id=100_000), Corrupt, "eos_token_id is 100000, but there are"),
        (spm_header(scores=None), FormatError, "neither"),
        (bpe_header(merges=[1.0, 2.0]), Corrupt, "merges holds floats, not texts"),
        (bpe_header(tokens=[1, 2]), Corrupt, "tokens holds ints, not texts"),
        (bpe_header(token_type=["a", "b"]), Corrupt, "token_type holds strs, not numbers"),
        (spm_header(scores=["a"]), Corrupt, "scores holds strs, not numbers"),
    ],
)
def test_headers_that_cannot_be_used(
    tmp_path: Path, cache_folder: Path, header: dict[str, object], error: type[Exception], words: str
) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", header)
    with pytest.raises(error, match=words):
        Tokenizer.from_gguf(gguf)


def test_folder(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.adds_bos) == (1, (2,), True)
    assert len(tokenizer.encode("abababababab", add_bos=False)) > 4  # a truncation left in the file is no limit here
    assert tokenizer.decode(tokenizer.encode("ab a")) == "ab a"
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.encode_chat([{"role": "user", "content": "ab"}]).count(1) == 1


def test_folder_template_in_the_settings(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, expected in (("plain", "plain"), (named, "D"), (None, None)):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": value}))
        assert Tokenizer.from_folder(folder).chat_template == expected
    path.write_text(json.dumps({"chat_template": 7}))
    with pytest.raises(FormatError, match="chat_template is int"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    ("file", "content", "error", "words"),
    [
        ("tokenizer.json", None, UsageError, "has no tokenizer.json; save it there"),
        ("tokenizer.json", "{", Corrupt, "not a tokenizer that can be read"),
        ("tokenizer_config.json", "{", Corrupt, "not JSON"),
        ("tokenizer_config.json", "[]", FormatError, "holds list, not an object"),
        ("tokenizer_config.json", "[" * 200_000, Corrupt, "not JSON"),
        ("tokenizer_config.json", '{"bos_token": "\\ud800"}', Corrupt, "bos_token is .*not Unicode"),
        ("chat_template.jinja", b"{{ \xa6 }}", Corrupt, "chat_template.jinja is not UTF-8"),
        ("generation_config.json", '{"eos_token_id": "x"}', FormatError, "eos_token_id is 'x'"),
    ],
)
def test_folders_that_cannot_be_used(
    folder: Path, file: str, content: str | bytes | None, error: type[Exception], words: str
) -> None:
    if content is None:
        (folder / file).unlink()
    elif isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        (folder / file).write_text(content)
    with pytest.raises(error, match=words):
        Tokenizer.from_folder(folder)


def test_an_unknown_decoder_is_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text())
    state["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    path.write_text(json.dumps(state))
    with pytest.raises(FormatError, match="decoder WordPiece is not understood; known are"):
        Tokenizer.from_folder(folder)


def test_half_a_character_is_no_text() -> None:
    with pytest.raises(UsageError, match="lone surrogate U\\+D800 at index 1"):
        SMOL.encode("a\ud800")


def test_spelling() -> None:
    assert Spelling(byte_level=True).bytes_of("\u0120\u00c3\u00a9") == b" \xc3\xa9"
    assert Spelling(byte_level=True).bytes_of("<\uff5c>") == "<\uff5c>".encode()
    assert Spelling(byte_level=False, byte_tokens=True).bytes_of("<0x0a>") == b"\n"
    assert Spelling(byte_level=False).bytes_of("<0x0A>") == b"<0x0A>"


def test_no_torch_and_no_transformers() -> None:
    code = (
        "import sys; from kvist.text.tokenizer import Tokenizer; from kvist.spec.source import resolve;"
        "Tokenizer.load(resolve('smollm2')).encode_chat([{'role': 'user', 'content': 'x'}]);"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
