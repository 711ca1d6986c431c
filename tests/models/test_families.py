"""Every family that can be run, as a small random model that ``transformers`` made and saved: the same answers.

Positions reach across windows, splits and the first range of LongRoPE. The float64 judge is held against the same
models, so that the laws' row by value stands on something.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

import kvist
import letters
from family_configs import CONFIGS, WIDE, random_model
from kvist.base.errors import BadValue, SpecError
from kvist.compose import LLM
from kvist.kernels.dispatch import VARIABLE
from kvist.kernels.native import variants
from kvist.model.decoder import Decoder
from kvist.spec.from_config import model_spec
from kvist.spec.model import Attention, LongRope, ModelSpec
from kvist.verify.compare import LOGITS, assert_bits_equal, assert_close, largest_row_error
from probing import all_logits

LENGTH = 300  # more than two splits of 128 keys, many windows, and past the first range of LongRoPE
NATIVE = variants()


def tokens(count: int = LENGTH, seed: int = 5) -> list[int]:
    return torch.randint(0, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


class Models:
    """Each kind's model and its folder, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.models: dict[str, Any] = {}

    def folder(self, kind: str) -> Path:
        folder = self.root / kind
        if kind not in self.models:
            self.models[kind] = random_model(CONFIGS[kind]())
            self.models[kind].save_pretrained(folder)
            letters.save(folder)
        return folder

    def right(self, kind: str, ids: list[int]) -> Tensor:
        self.folder(kind)
        return expected(self.models[kind], ids)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("families"))


def load(folder: Path, kernels: str = NATIVE[0], **settings: Any) -> LLM:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, kernels)
        return kvist.load(folder, **{"ctx_size": 512, "max_num_seqs": 2, "block_size": 16, **settings})


@pytest.mark.parametrize("kernels", [NATIVE[0], "reference"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_transformers(models: Models, kind: str, kernels: str) -> None:
    llm = load(models.folder(kind), kernels)
    assert llm.setup is not None and llm.setup.dtype == "float32"
    right = models.right(kind, tokens())
    assert right.std() > 0.1
    assert_close(all_logits(llm, tokens(), LENGTH), right, LOGITS, kind, largest_row_error)


@pytest.mark.parametrize("kind", CONFIGS)
def test_pieces_do_not_matter(models: Models, kind: str) -> None:
    llm = load(models.folder(kind))
    whole = all_logits(llm, tokens(), LENGTH)
    for chunk in (7, 64):
        assert_bits_equal(all_logits(llm, tokens(), chunk), whole, f"chunks of {chunk}")
    assert_bits_equal(all_logits(llm, tokens(40), 1), whole[:40], "one by one")


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_judge_knows_the_family(models: Models, kind: str) -> None:
    from kvist.verify.course import Subject
    from kvist.verify.judge import judge_logits
    from kvist.verify.value import held_weights

    llm = load(models.folder(kind))
    decoder = llm.engine._runner.decoder
    assert isinstance(decoder, Decoder) and llm.setup is not None
    from kvist.base.dtypes import FLOAT32
    from kvist.compose.wiring import open_model
    from kvist.model.weights import load_weights
    from kvist.spec.source import resolve

    _, checkpoint, _ = open_model(resolve(str(models.folder(kind))))
    weights = load_weights(decoder.spec, checkpoint, decoder.backend, FLOAT32)
    subject = Subject(kind, decoder.spec, weights, FLOAT32, lambda count: decoder.backend)
    # Past the first split and range, but not far: float32 angles drift from exact ones with the position.
    ids = tokens(150)
    found = judge_logits(decoder.spec, held_weights(subject), ids)
    assert_close(found, models.right(kind, ids), LOGITS, kind, largest_row_error)


def test_longrope_is_fixed_by_the_context(models: Models) -> None:
    """A short context takes the short factors, as ``transformers`` does for a text that stays below the range."""
    kind = "phi3 longrope"
    short, long = load(models.folder(kind), ctx_size=128), load(models.folder(kind), ctx_size=129)
    ids = tokens(120)
    right = models.right(kind, ids)
    assert_close(all_logits(short, ids, 64), right, LOGITS, "short", largest_row_error)
    assert [chosen(llm) for llm in (short, long)] == ["short", "long"]
    # The same text under the long factors is another function, and stays it however short a request is.
    assert largest_row_error(all_logits(long, ids, 64), right) > 100 * LOGITS
    assert_bits_equal(all_logits(long, ids[:30], 30), all_logits(long, ids, 64)[:30], "a short request")
    assert long.setup is not None and "the long factors, fixed by a context of 129" in long.setup.spec.notes[-1]


def chosen(llm: LLM) -> str | None:
    assert llm.setup is not None
    attention = llm.setup.spec.layers[0].attention
    assert isinstance(attention, Attention) and attention.rope is not None
    assert isinstance(attention.rope.scaling, LongRope)
    return attention.rope.scaling.chosen


def config(kind: str, **changes: Any) -> dict[str, Any]:
    found = {**json.loads(CONFIGS[kind]().to_json_string()), **changes}
    return {name: value for name, value in found.items() if value != "absent"}


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers if isinstance(layer.attention, Attention)]


def test_windows_that_are_switched_off() -> None:
    words = ["sliding_attention"] * 3
    assert windows(model_spec(config("qwen2", layer_types=words))) == [None] * 3
    assert windows(model_spec(config("mistral"))) == [None] * 3
    assert windows(model_spec(config("qwen2 windows", layer_types="absent"))) == [None, 40, 40]
    assert windows(model_spec(config("gemma2", layer_types="absent"))) == [40, None, 40]


def test_what_published_configs_leave_out() -> None:
    gemma2 = model_spec(config("gemma2", attn_logit_softcapping="absent", final_logit_softcapping="absent"))
    assert gemma2.logit_softcap == 30.0
    assert isinstance(gemma2.layers[0].attention, Attention) and gemma2.layers[0].attention.softcap == 50.0
    falcon = model_spec(config("falcon", max_position_embeddings="absent", ffn_hidden_size="absent"))
    assert (falcon.max_position, falcon.layers[0].feed_forward.intermediate_size) == (2048, 4 * 48)
    assert "max_position_embeddings = 2048 is the class default" in falcon.notes
    assert model_spec(config("gemma", hidden_act="gelu")).layers[0].feed_forward.activation == "gelu_tanh"
    assert model_spec(config("gpt_neox", hidden_act="gelu")).layers[0].feed_forward.activation == "gelu"


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("falcon", {"alibi": True}, "alibi is true: such a falcon cannot be run"),
        ("mistral", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50, .*set it to null"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30, but a qwen3 caps nothing there"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is true"),
        ("smollm3 list", {"no_rope_layers": [1, 2, 1]}, r"no_rope_layers\[1\] = 2"),
        ("phi3 longrope", {"rope_parameters": {"rope_type": "longrope"}}, "original_max|short_factor"),
        ("phi3 longrope", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "1 factors, but .* 4"),
        ("mistral", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "allowed|full"),
    ],
)
def test_refusals(kind: str, changes: dict[str, Any], words: str) -> None:
    if "layer_types" in changes:
        changes = {**changes, "sliding_window": 40}
    with pytest.raises((BadValue, SpecError), match=words):
        model_spec(config(kind, **changes))


def test_gemma3_caps_its_logits_and_no_scores() -> None:
    """``transformers`` reads the second field and not the first, which published configs set to null."""
    gemma3 = json.loads(transformers.Gemma3TextConfig(**WIDE, sliding_window=40).to_json_string())
    capped = model_spec({**gemma3, "attn_logit_softcapping": None, "final_logit_softcapping": 7.0})
    assert capped.logit_softcap == 7.0
    assert [layer.attention.softcap for layer in capped.layers if isinstance(layer.attention, Attention)] == [None] * 3
    with pytest.raises(BadValue, match=r"attn_logit_softcapping = 50, but a gemma3 caps nothing there"):
        model_spec({**gemma3, "attn_logit_softcapping": 50.0})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"gptq, 4 bits"),
        ({"quant_method": "awq", "bits": 4}, "awq, 4 bits"),
        ({"quant_method": "fp8"}, r"\(fp8\)"),
        ({"quant_method": "mxfp4"}, r"\(mxfp4\)"),
        ({"quant_algo": "NVFP4"}, r"\(NVFP4\)"),
    ],
)
def test_quantised_checkpoints_are_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        model_spec(config("qwen2", quantization_config=settings))


def test_all_tensors_of_a_published_gpt2_are_known(models: Models) -> None:
    """Without its prefix, and with the causal masks that old checkpoints store."""
    from kvist.spec.names import match_names

    spec = model_spec(config("gpt2"))
    models.folder("gpt2")
    shapes = {
        name.removeprefix("transformer."): tuple(tensor.shape)
        for name, tensor in models.models["gpt2"].state_dict().items()
        if name != "lm_head.weight"
    }
    shapes["h.0.attn.bias"] = (1, 1, 512, 512)
    match_names(spec, shapes, "hf", shapes).require("gpt2")
    assert torch.float32 == models.models["gpt2"].dtype
