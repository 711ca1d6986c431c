"""Models whose weights stay packed: small random files of every type, and how they are loaded, refused and verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvist import load
from kvist.base.dtypes import BFLOAT16, FLOAT32
from kvist.base.errors import OutOfMemory, UsageError
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Backend
from kvist.kernels.packed import PACKED_TYPES, PackedWeight
from kvist.model import weights as weights_module
from kvist.model.checkpoint import GgufCheckpoint, loaded_bytes
from kvist.model.held import held_as
from kvist.model.weights import ModelWeights, load_weights
from kvist.spec.from_gguf import GgufModel, gguf_model
from kvist.verify.compare import KL_PACKED_PRODUCTS, assert_bits_equal, kl_divergence
from kvist.verify.course import Course, Subject
from kvist.verify.laws import Laws, paths
from kvist.verify.value import check_value, held_weights
from packed_files import write_llama

if not variants():
    pytest.skip("the native kernels are not built", allow_module_level=True)

TOKENS = [(i * 37 + 5) % 320 for i in range(330)]
MIXED = {"": "q4_k", "attn_v": "q6_k", "attn_k": "q5_0", "ffn_up": "q4_0", "ffn_down": "q5_1", "token_embd": "q8_0"}


def subject_of(model: GgufModel, packed: bool = True, variant: str | None = None, kv: str = "bfloat16") -> Subject:
    backend = NativeBackend(variant, 2)
    weights = load_weights(model.spec, GgufCheckpoint(model), backend, BFLOAT16 if packed else FLOAT32, packed=packed)

    def threads(count: int | None) -> Backend:
        return NativeBackend(backend.variant, count or 2)

    return Subject("random", model.spec, weights, BFLOAT16 if kv == "bfloat16" else FLOAT32, threads)


def logits(subject: Subject) -> torch.Tensor:
    course = Course(subject, length=len(TOKENS), step_tokens=len(TOKENS))
    course.feed([(course.lane(TOKENS), len(TOKENS))], keep=False)
    return course.rows(len(TOKENS), range(0, len(TOKENS), 5))


@pytest.mark.parametrize("kind", PACKED_TYPES)
def test_every_type_against_the_unpacked_model(tmp_path: Path, kind: str) -> None:
    model = gguf_model(write_llama(tmp_path / "model.gguf", {"": kind}))
    packed, exact = subject_of(model, kv="float32"), subject_of(model, packed=False, kv="float32")
    assert packed.weights.packed and not exact.weights.packed
    names = ("embed", *(f"layers.1.{role}" for role in ("q", "k", "v", "o", "gate", "up", "down")))
    for name in names:  # the same values, rows of q and k put back in order, gate and up apart
        assert_bits_equal(held_weights(packed)(name), held_weights(exact)(name), name)
    divergence = kl_divergence(logits(packed), logits(exact))
    assert 0 < divergence < KL_PACKED_PRODUCTS
    assert check_value(packed, TOKENS, [0, 70, 329]).holds


@pytest.mark.parametrize("variant", variants())
def test_laws_on_a_file_of_many_types(tmp_path: Path, variant: str) -> None:
    subject = subject_of(gguf_model(write_llama(tmp_path / "model.gguf", MIXED)), variant=variant)
    assert subject.weights.layers[0].qkv.parts == ((256, "q4_k"), (128, "q5_0"), (128, "q6_k"))  # type: ignore[attr-defined]
    laws = Laws(subject, TOKENS)
    rows = [laws.check(path) for path in paths(subject.spec, len(TOKENS), full=False)]
    assert rows and all(row.holds for row in rows), [row for row in rows if not row.holds]


def test_what_cannot_stay_packed_is_unpacked_beside_it(tmp_path: Path) -> None:
    model = gguf_model(write_llama(tmp_path / "model.gguf", {**MIXED, "attn_v": "f16", "ffn_down": "f16"}))
    subject = subject_of(model)
    layer: ModelWeights = subject.weights
    assert isinstance(layer.embed, PackedWeight) and layer.head is layer.embed
    assert isinstance(layer.layers[0].o, PackedWeight)
    assert layer.layers[0].qkv.dtype == layer.layers[0].down.dtype == BFLOAT16
    assert check_value(subject, TOKENS, [0, 70, 329]).holds


def test_load_takes_packed_by_itself_and_says_so(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", MIXED)
    prompt = [TOKENS[:20]]
    llm = load(path, ctx_size=64)
    assert llm.setup is not None and (llm.setup.weights, llm.setup.kv_cache_dtype) == ("packed", "bfloat16")
    assert llm.setup.weight_bytes < 1.15 * path.stat().st_size
    packed = llm.generate(prompt, max_tokens=8)[0].ids
    assert load(path, ctx_size=64, weights="packed", threads=1).generate(prompt, max_tokens=8)[0].ids == packed
    for settings in ({"weights": "bfloat16"}, {"dtype": "bfloat16"}, {"weights": "float32"}, {"dtype": "float32"}):
        llm = load(path, ctx_size=64, **settings)  # type: ignore[arg-type]
        assert llm.setup is not None and llm.setup.weights == llm.setup.dtype == next(iter(settings.values()))
    for wrong, words in (
        ({"weights": "q4_0"}, "unknown element type 'q4_0'"),
        ({"weights": "float32", "dtype": "bfloat16"}, "contradict"),
    ):
        with pytest.raises(UsageError, match=words):
            load(path, ctx_size=64, **wrong)
    plain = write_llama(tmp_path / "plain.gguf", {"": "f16"})
    with pytest.raises(UsageError, match="no matrix of this model"):
        load(plain, ctx_size=64, weights="packed")
    llm = load(plain, ctx_size=64)
    assert llm.setup is not None and llm.setup.weights == "bfloat16"


def test_a_model_that_does_not_fit_is_refused_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = gguf_model(write_llama(tmp_path / "model.gguf", MIXED))
    checkpoint, backend = GgufCheckpoint(model), NativeBackend()
    packed, plain = held_as(model.spec, checkpoint, backend), held_as(model.spec, checkpoint, backend, "bfloat16")
    assert packed.nbytes == loaded_bytes(model.spec, 2, checkpoint) < plain.nbytes == packed.unpacked_nbytes
    monkeypatch.setattr(weights_module, "available_memory", lambda: packed.nbytes)
    packed.require_memory("model")
    with pytest.raises(OutOfMemory, match=r"as bfloat16, and .* free: .*--weights packed \(0\.00 GiB\)"):
        plain.require_memory("model")
    monkeypatch.setattr(weights_module, "available_memory", lambda: packed.nbytes - 1)
    with pytest.raises(OutOfMemory, match=r"as packed \(0\.00 GiB as bfloat16\)"):
        packed.require_memory("model")
