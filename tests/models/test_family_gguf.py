"""Every family from a GGUF file: names, order of rows and metadata give the model that ``transformers`` has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gguf_files
from family_configs import CONFIGS, IN_GGUF, random_model
from kvist.base.dtypes import FLOAT32
from kvist.kernels.native import NativeBackend
from kvist.model.checkpoint import GgufCheckpoint
from kvist.model.weights import load_weights
from kvist.spec.from_gguf import gguf_model
from kvist.spec.rope import fix_context
from kvist.verify.compare import LOGITS, assert_close, largest_row_error
from kvist.verify.course import Course, Subject

LENGTH = 200


@pytest.mark.parametrize("kind", IN_GGUF)
def test_logits_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    model = random_model(CONFIGS[kind]())
    found = gguf_model(gguf_files.save(model, tmp_path / "model.gguf"))
    spec, backend = fix_context(found.spec, 512), NativeBackend()
    weights = load_weights(spec, GgufCheckpoint(found), backend, FLOAT32)
    course = Course(Subject(kind, spec, weights, FLOAT32, lambda count: backend), length=LENGTH, step_tokens=LENGTH)
    ids = torch.randint(0, 97, (LENGTH,), generator=torch.Generator().manual_seed(9)).tolist()
    course.feed([(course.lane(ids), LENGTH)], keep=False)
    with torch.inference_mode():
        right = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    assert_close(course.rows(LENGTH, range(LENGTH)), right, LOGITS, kind, largest_row_error)
