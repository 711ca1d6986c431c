from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Encoder
from tokenizers import models

from kvist.text.vocabulary import NORMAL, Vocabulary, derive_merges, read_vocabulary
from kvist.text.vocabulary_cache import load_vocabulary

from .conftest import spm_header, write_gguf

words = st.lists(st.text(alphabet="abc", min_size=2, max_size=5), max_size=14, unique=True)


def every_pair(tokens: list[str]) -> list[tuple[str, str]]:
    """All pairs that spell a token, by the token's rank, longer left part first."""
    known = set(tokens)
    splits = [(t[:i], t[i:]) for t in tokens for i in range(len(t) - 1, 0, -1)]
    return [(a, b) for a, b in splits if a in known and b in known]


@given(words, st.text(alphabet="abc", max_size=30))
def test_kept_merges_give_the_ids_of_all_of_them(longer: list[str], text: str) -> None:
    tokens = ["a", "b", "c", *longer]
    scores = [-float(i) for i in range(len(tokens))]
    merges = derive_merges(tokens, [NORMAL] * len(tokens), scores)
    kept = Vocabulary(tuple(tokens), merges, (), ())
    vocab = {token: index for index, token in enumerate(tokens)}
    few = Encoder(models.BPE(vocab=vocab, merges=kept.merge_pairs()))
    all_pairs = Encoder(models.BPE(vocab=vocab, merges=every_pair(tokens)))
    assert len(kept.merge_pairs()) <= len(longer)
    assert few.encode(text).ids == all_pairs.encode(text).ids


def test_a_copy_is_kept_and_used(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", spm_header())
    first = load_vocabulary(gguf, tmp_path / "copies")
    (copy,) = (tmp_path / "copies").iterdir()
    assert first == read_vocabulary(gguf)
    stamp = copy.stat().st_mtime_ns
    assert load_vocabulary(gguf, tmp_path / "copies") == first
    assert copy.stat().st_mtime_ns == stamp
    other = write_gguf(tmp_path / "n.gguf", spm_header(scores=[-score for score in spm_header()["scores"]]))
    assert load_vocabulary(other, tmp_path / "copies") != first  # another header never meets this copy


def test_a_damaged_copy_is_rebuilt(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", spm_header())
    first = load_vocabulary(gguf, tmp_path / "copies")
    (copy,) = (tmp_path / "copies").iterdir()
    whole = copy.read_bytes()
    cuts = [whole[: len(whole) * part // 8] for part in range(8)]
    flips = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), len(whole) // 40)]
    for damaged in [*cuts, *flips, whole + b"x"]:
        copy.write_bytes(damaged)
        assert load_vocabulary(gguf, tmp_path / "copies") == first
        assert copy.read_bytes() == whole


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", spm_header())
    (tmp_path / "file").write_text("in the way")
    assert load_vocabulary(gguf, tmp_path / "file") == read_vocabulary(gguf)


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", spm_header())

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert load_vocabulary(gguf, tmp_path / "copies") == read_vocabulary(gguf)
    assert list((tmp_path / "copies").iterdir()) == []
