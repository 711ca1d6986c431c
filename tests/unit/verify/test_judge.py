"""The whole-model judge against transformers, which is made to compute in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvist.base.errors import VerifyError
from kvist.spec.from_config import model_spec
from kvist.spec.model import ModelSpec
from kvist.spec.names import expected_tensors
from kvist.verify.compare import JUDGE, LOGITS, assert_close, relative_error
from kvist.verify.judge import judge_hidden, judge_logits

transformers = pytest.importorskip("transformers")
SINGLES = (torch.float32, torch.float)

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: llama(tie_word_embeddings=False),
    "llama-tied-mha": lambda: llama(tie_word_embeddings=True, num_key_value_heads=4),
    "llama-biases": lambda: llama(attention_bias=True, mlp_bias=True),
    "llama-linear": lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
    "llama3": lambda: llama(rope_parameters=LLAMA3),
    "gemma3": lambda: gemma3(sliding_window=8),
    "gemma3-linear": lambda: gemma3(sliding_window=5, rope_scaling={"rope_type": "linear", "factor": 8.0}),
}


class InDouble(TorchFunctionMode):
    """Every float32 that code asks for by name becomes float64: upcasts in norms, rotation and softmax included."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if any(a is s for s in SINGLES) else a for a in args]
        kwargs = {key: torch.float64 if any(v is s for s in SINGLES) else v for key, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


def llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**TINY, "num_hidden_layers": 3, **changes})


def gemma3(**changes: Any) -> Any:
    return transformers.Gemma3TextConfig(
        **{**TINY, "num_hidden_layers": 7, "num_key_value_heads": 1, "query_pre_attn_scalar": 24, **changes}
    )


def tiny(name: str, dtype: torch.dtype) -> tuple[Any, ModelSpec, Callable[[str], torch.Tensor]]:
    """(transformers model with every weight random, its spec, its weights by canonical name)."""
    config = MODELS[name]()
    torch.manual_seed(7)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too: ones and zeros would hide their absence
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.15))
            if parameter.dim() == 1 and name.startswith("llama"):
                parameter += 1
    spec = model_spec(config.to_dict() | {"architectures": [type(model).__name__]})
    state, names = model.state_dict(), expected_tensors(spec)
    return model, spec, lambda canonical: state[names[canonical].name]


def tokens_of(spec: ModelSpec, count: int) -> list[int]:
    return torch.randint(0, spec.vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers_in_float64(name):
    with InDouble():
        model, spec, weights = tiny(name, torch.float64)
        tokens = tokens_of(spec, 40)
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0]
    assert expected.dtype == torch.float64
    got = judge_logits(spec, weights, tokens)
    assert_close(got, expected, JUDGE)
    assert_close(judge_logits(spec, weights, tokens, positions=[39, 3]), got[[39, 3]], JUDGE)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_is_close_to_transformers_in_float32(name):
    model, spec, weights = tiny(name, torch.float32)
    tokens = tokens_of(spec, 40)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert_close(judge_logits(spec, weights, tokens), expected, LOGITS)


def test_every_fact_of_the_spec_and_every_weight_matters():
    _, spec, weights = tiny("gemma3", torch.float64)
    tokens = tokens_of(spec, 30)
    right = judge_logits(spec, weights, tokens)

    def attention(**changes):
        return replace(
            spec, layers=tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in spec.layers)
        )

    rope = spec.layers[0].attention.rope
    for wrong in (
        attention(window=9),
        attention(scale=0.2),
        attention(softcap=1.0),
        attention(qk_norm=False),
        attention(rope=replace(rope, theta=1e3)),
        attention(rope=replace(rope, rotary_dim=8)),
        attention(rope=replace(rope, divisors=tuple(1.0 + i for i in range(8)))),
        replace(spec, layers=tuple(replace(layer, post_norms=False) for layer in spec.layers)),
        replace(spec, layers=tuple(replace(layer, norm=replace(layer.norm, offset=0.0)) for layer in spec.layers)),
        replace(spec, norm=replace(spec.norm, eps=0.1)),
        replace(spec, embedding_scale=1.0),
        replace(spec, logit_softcap=2.0),
    ):
        assert relative_error(judge_logits(wrong, weights, tokens), right) > LOGITS
    for name, tensor in expected_tensors(spec).items():
        if not tensor.optional:
            error = relative_error(
                judge_logits(spec, lambda n, name=name: weights(n) * 1.3 + 0.01 if n == name else weights(n), tokens),
                right,
            )
            assert error > LOGITS, name


def test_the_stream_is_shown_layer_by_layer():
    _, spec, weights = tiny("llama", torch.float64)
    seen: list[int] = []
    judge_hidden(spec, weights, [3, 4, 5], observe=lambda layer, x: seen.append(layer) or None)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("tokens", [[], [1, 96], [-1]])
def test_tokens_outside_the_vocabulary_are_refused(tokens):
    _, spec, weights = tiny("llama", torch.float64)
    with pytest.raises(VerifyError, match="vocabulary of 96"):
        judge_logits(spec, weights, tokens)
