"""Loading takes little more memory than the loaded weights: the peak of a process that does nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run

import pytest
import torch
from transformers import LlamaConfig

import hf_models
import letters

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc"),
]

BOUND = 1.4  # peak above the size after import, in loaded weights; cache, buffers and the first token included
CODE = """
import json, re, sys
from pathlib import Path
import torch, safetensors, tokenizers, gguf
import kvist.compose

def peak():  # getrusage would begin with the size of the process that forked this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

before = peak()
llm = kvist.load(sys.argv[1], dtype=sys.argv[2], ctx_size=256, max_num_seqs=1)
loaded = peak()
done = llm.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)[0]
print(json.dumps({"loaded": loaded - before, "ran": peak() - before, "weights": llm.setup.weight_bytes,
                  "tokens": done.generated_tokens}))
"""


def measured(model: str | Path, dtype: str) -> dict[str, int]:
    done = run([sys.executable, "-c", CODE, str(model), dtype], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    assert found["tokens"] == 2
    assert found["loaded"] > 0.9 * found["weights"]  # the measure sees the weights
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.full)])
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_a_bundled_model(model: str, dtype: str) -> None:
    found = measured(model, dtype)
    assert found["ran"] < BOUND * found["weights"], found


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_a_folder(tmp_path: Path, stored: torch.dtype) -> None:
    """Pages of a mapped file count as well, as long as it stays mapped."""
    config = LlamaConfig(
        vocab_size=16_000,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=10,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    hf_models.model_of(config).to(stored).save_pretrained(tmp_path)
    found = measured(letters.save(tmp_path), "bfloat16")
    assert found["weights"] > 80 << 20
    assert found["ran"] < BOUND * found["weights"], found
