from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvist.base.errors import BadValue
from kvist.spec.model import LinearScaling, Llama3Scaling, Rope, RopeScaling
from kvist.spec.rope import attention_factor, inverse_frequencies, round_float32

# Relative, in float32 steps: the power function of a tensor library is not rounded correctly everywhere, and the ramp
# of llama3 scaling subtracts near neighbours, which widens the difference.
STEP = 2**-23
PLAIN_STEPS, RAMP_STEPS = 2, 4


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0])
@pytest.mark.parametrize(
    ("scaling", "parameters"),
    [
        (None, {"rope_type": "default"}),
        (LinearScaling(8.0), {"rope_type": "linear", "factor": 8.0}),
        (
            Llama3Scaling(32.0, 1.0, 4.0, 8192),
            {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_frequencies_are_those_that_models_were_trained_with(
    theta: float, scaling: RopeScaling | None, parameters: dict[str, Any]
) -> None:
    config = LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    theirs = LlamaRotaryEmbedding(config)
    ours = torch.tensor(inverse_frequencies(Rope(theta, 128, scaling)), dtype=torch.float64)
    steps = RAMP_STEPS if isinstance(scaling, Llama3Scaling) else PLAIN_STEPS
    assert ((ours - theirs.inv_freq.double()).abs() <= steps * STEP * ours).all()
    assert theirs.attention_scaling == attention_factor(Rope(theta, 128, scaling))


def test_divisors_replace_scaling() -> None:
    plain = inverse_frequencies(Rope(10_000.0, 8))
    divided = inverse_frequencies(Rope(10_000.0, 8, None, (1.0, 2.0, 4.0, 8.0)))
    assert divided == tuple(round_float32(f / d) for f, d in zip(plain, (1, 2, 4, 8), strict=True))
    with pytest.raises(BadValue, match="4 channel pairs, but 2 frequency divisors"):
        inverse_frequencies(Rope(10_000.0, 8, None, (1.0, 2.0)))


def test_values_are_float32() -> None:
    values = inverse_frequencies(Rope(500_000.0, 64, Llama3Scaling(8.0, 1.0, 4.0, 8192)))
    assert all(value == round_float32(value) for value in values) and len(values) == 32
