"""Published configs, cut down to what this machine can hold: two of the layers and a part of the vocabulary."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

import letters

PATH = Path(__file__).resolve().parent / "data" / "published_configs.json"
VOCAB = 2048  # rows of the embedding that are kept: a row more is another column of the same product
_LAYERS = ("num_hidden_layers", "n_layer")
_LARGE = 9_000_000  # elements of one matrix of the feed forward; beyond it a comparison takes tens of seconds


@dataclass(frozen=True, slots=True)
class Published:
    """One model: its published fields, which two layers stay, and how many positions are compared."""

    id: str
    config: dict[str, Any]
    layers: tuple[int, int]
    length: int

    @property
    def large(self) -> bool:
        """Whether a comparison takes more than seconds."""
        hidden = self.config.get("hidden_size") or self.config["n_embd"]
        return hidden * self.config.get("intermediate_size", 4 * hidden) > _LARGE

    def cut(self) -> dict[str, Any]:
        """The config with two layers and a small vocabulary; all else as published."""
        config = copy.deepcopy(self.config)
        for name in _LAYERS:
            if name in config:
                config[name] = 2
        if "no_rope_layers" in config:
            config["no_rope_layers"] = [config["no_rope_layers"][index] for index in self.layers]
        if "sliding_window_pattern" in config:
            period = config.pop("sliding_window_pattern")
            kinds = ["full_attention" if (index + 1) % period == 0 else "sliding_attention" for index in self.layers]
            config["layer_types"] = kinds
        config["vocab_size"] = min(VOCAB, config["vocab_size"])
        return {**config, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

    def whole_class(self) -> Any:
        """What ``transformers`` makes of the whole config."""
        config = copy.deepcopy(self.config)
        return AutoConfig.for_model(config.pop("model_type"), **config)

    @torch.no_grad()
    def model(self) -> PreTrainedModel:
        """A float32 model of the cut config whose random weights bfloat16 can hold; biases and norms moved away."""
        config = self.cut()
        made = AutoConfig.for_model(config.pop("model_type"), **config)
        # Scores of thousands of positions would take gigabytes; what caps scores has no other way.
        capped = getattr(made, "attn_logit_softcapping", None) is not None
        kind = AutoModelForCausalLM._model_mapping[type(made)]
        with no_init_weights():
            model = kind._from_config(
                made, dtype=torch.float32, attn_implementation="eager" if capped or self.length < 1100 else "sdpa"
            )
        model.tie_weights()
        draw = torch.Generator().manual_seed(11)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                ones = name.endswith("weight") and not made.model_type.startswith("gemma")
                parameter.copy_(float(ones) + 0.3 * torch.randn(parameter.shape, generator=draw))
            else:
                parameter.normal_(std=2 / parameter.shape[-1] ** 0.5, generator=draw)
            parameter.copy_(parameter.bfloat16())
        return model.eval()

    def save(self, model: PreTrainedModel, folder: Path) -> Path:
        """``model`` as a bfloat16 folder in shards, with the config as it was published and not as ``transformers``
        writes it."""
        state = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
        model.save_pretrained(folder, state_dict=state, max_shard_size="500MB")
        (folder / "config.json").write_text(json.dumps(self.cut()), encoding="utf-8")
        return letters.save(folder)


def _models() -> dict[str, Published]:
    found = json.loads(PATH.read_text(encoding="utf-8"))["models"]
    made = (
        Published(entry["id"], entry["config"], tuple(entry.get("layers", (0, 1))), entry.get("length", 300))
        for entry in found
    )
    return {one.id: one for one in made}


MODELS = _models()
