"""One real run of ``kvist learn --all --plot``, and a small model for the scripts that measure one."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import letters
from kvist.cli.main import run
from kvist.learn import run as running
from kvist.learn.run import Finding
from kvist.spec.from_config import model_spec
from kvist.spec.names import expected_tensors


@dataclass(frozen=True)
class Everything:
    code: int
    text: str
    findings: dict[str, Finding]
    pictures: Path


@pytest.fixture(scope="session")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Everything:
    torch.set_num_threads(1)
    findings: dict[str, Finding] = {}
    patch = pytest.MonkeyPatch()
    original = running.run_script

    def kept(topic: str, *rest: object) -> Finding:
        findings[topic] = original(topic, *rest)
        return findings[topic]

    patch.setattr(running, "run_script", kept)
    printed, pictures = io.StringIO(), tmp_path_factory.mktemp("pictures")
    with contextlib.redirect_stdout(printed):
        code = run(["learn", "--all", "--plot", str(pictures)])
    patch.undo()
    return Everything(code, printed.getvalue(), findings, pictures)


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama of two layers, long enough for every depth that is measured."""
    folder = letters.save(tmp_path_factory.mktemp("small"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": letters.SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": letters.END,
    }
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(5)
    tensors = {
        tensor.name: torch.randn(tensor.shape, generator=draw) * 0.2
        for tensor in expected_tensors(model_spec(folder)).values()
        if not tensor.optional
    }
    save_file(tensors, str(folder / "model.safetensors"))
    return folder
