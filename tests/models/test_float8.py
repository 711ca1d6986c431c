"""Checkpoints in float8 with a factor for each block: what is loaded is value for value what the file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import letters
from family_configs import CONFIGS, random_model
from kvist.base.dtypes import FLOAT32
from kvist.base.errors import FormatError, WeightsError
from kvist.kernels.reference import ReferenceBackend
from kvist.model.checkpoint import SafetensorsCheckpoint
from kvist.model.weights import load_weights
from kvist.spec.from_config import model_spec
from kvist.spec.source import resolve
from kvist.verify.compare import LOGITS, assert_close, largest_row_error
from kvist.verify.course import Subject
from kvist.verify.judge import judge_logits
from kvist.verify.value import held_weights

BLOCK = (16, 24)  # many blocks in small matrices, and no whole number of them in most
LARGEST = 448.0  # of e4m3


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(float8 values, factors, what they stand for) of a matrix."""
    rows, columns = (-(-extent // size) for extent, size in zip(weight.shape, BLOCK, strict=True))
    factors = torch.empty(rows, columns)
    wide = torch.empty_like(weight)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * BLOCK[0], (i + 1) * BLOCK[0]), slice(j * BLOCK[1], (j + 1) * BLOCK[1]))
            factors[i, j] = weight[part].abs().max() / LARGEST
            wide[part] = factors[i, j]
    values = (weight / wide).to(torch.float8_e4m3fn)
    return values, factors, values.float() * wide


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(the float8 checkpoint, the same numbers as float32)."""
    root = tmp_path_factory.mktemp("float8")
    packed, plain = root / "packed", root / "plain"
    random_model(CONFIGS["deepseek_v3"]()).save_pretrained(plain)
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        matrix = tensor.dim() == 2 and "_proj" in name
        if matrix:
            values, factors, tensors[name] = quantised(tensor)
            stored[name], stored[f"{name}_scale_inv"] = values, factors
        else:
            stored[name] = tensor
    # A layer for multi-token prediction, which is not read.
    stored["model.layers.3.eh_proj.weight"] = torch.zeros(4, 8).to(torch.float8_e4m3fn)
    stored["model.layers.3.eh_proj.weight_scale_inv"] = torch.zeros(1, 1)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    packed.mkdir()
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    (packed / "config.json").write_text(
        json.dumps({**config, "num_nextn_predict_layers": 1, "quantization_config": settings})
    )
    for folder in (packed, plain):
        letters.save(folder)
    return packed, plain


def subject(folder: Path) -> Subject:
    spec = model_spec(folder)
    backend = ReferenceBackend()
    checkpoint = SafetensorsCheckpoint(spec, resolve(str(folder)).shards())
    weights = load_weights(spec, checkpoint, backend, FLOAT32)
    return Subject(folder.name, spec, weights, FLOAT32, lambda threads: backend)


def test_every_matrix_is_unpacked(folders: tuple[Path, Path]) -> None:
    packed, plain = (held_weights(subject(folder)) for folder in folders)
    for name in (
        "layers.0.q_a",
        "layers.0.kv_a",
        "layers.1.kv_b",
        "layers.1.o",
        "layers.2.experts.5.up",
        "layers.0.down",
    ):
        assert torch.equal(packed(name), plain(name)), name


def test_logits_are_those_of_the_unpacked_numbers(folders: tuple[Path, Path]) -> None:
    packed, plain = folders
    ids = torch.randint(0, 97, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    with torch.inference_mode():
        right = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    found = subject(packed)
    assert_close(judge_logits(found.spec, held_weights(found), ids), right, LOGITS, "float8", largest_row_error)


def test_factors_must_be_there_and_fit(folders: tuple[Path, Path], tmp_path: Path) -> None:
    packed, _ = folders
    (tmp_path / "config.json").write_text((packed / "config.json").read_text())
    stored = load_file(packed / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    factors = stored.pop(name)

    def opened() -> SafetensorsCheckpoint:
        save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
        return SafetensorsCheckpoint(model_spec(tmp_path), (tmp_path / "model.safetensors",))

    with pytest.raises(WeightsError, match=r"o_proj.weight_scale_inv has to be \[3, 2\]; it is missing"):
        opened()
    stored[name] = factors[:2].clone()
    with pytest.raises(WeightsError, match=r"has to be \[3, 2\]; it is \[2, 2\]"):
        opened()
    stored[name] = factors
    stored["model.norm.weight"] = stored["model.norm.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(FormatError, match="only matrices have a factor"):
        opened()


def test_float8_without_factors_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = folders
    (tmp_path / "config.json").write_text((plain / "config.json").read_text())
    save_file(load_file(packed / "model.safetensors"), tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match="F8_E4M3"):
        SafetensorsCheckpoint(model_spec(tmp_path), (tmp_path / "model.safetensors",))
