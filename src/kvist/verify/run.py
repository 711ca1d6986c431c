"""``kvist verify``: every law on every path of a model, on the user's own machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import VerifyError
from kvist.compose import default_context, open_model
from kvist.kernels.dispatch import VARIABLE, choose
from kvist.kernels.fingerprint import fingerprint
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Backend
from kvist.model.held import PACKED, can_pack, held_as
from kvist.model.weights import load_weights
from kvist.spec.model import Attention, ModelSpec
from kvist.spec.rope import fix_context
from kvist.spec.source import resolve
from kvist.text.tokenizer import Tokenizer
from kvist.verify.course import Course, Subject
from kvist.verify.laws import Laws, in_chunks, paths
from kvist.verify.report import FirstDifference, LawRow, Report
from kvist.verify.value import check_value


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run: tokens of the text, rows of the judge, every kernel variant and type or only the default."""

    tokens: int
    judged: int
    everything: bool = False


QUICK = Effort(tokens=320, judged=6)
NORMAL = Effort(tokens=640, judged=10)
FULL = Effort(tokens=768, judged=12, everything=True)

Announce = Callable[[str], None]


def verify(
    model: str,
    effort: Effort = NORMAL,
    *,
    dtype: str = "auto",
    weights: str = "auto",
    announce: Announce = lambda text: None,
    found: Callable[[LawRow], None] = lambda row: None,
) -> Report:
    """Load ``model`` and check every law on every path that it has.

    ``announce`` is told what runs, ``found`` is given each row as it is known. ``dtype`` and ``weights`` auto: packed
    where GGUF has quantised, else bfloat16; with ``FULL`` packed, bfloat16 and float32. VerifyError on
    the reference kernels, which promise values but not bits.
    """
    if choose().backend.name == "reference":
        raise VerifyError(
            "only the reference kernels are here, and they keep the laws by value, not by bits: install a C++20 "
            f"compiler and reinstall kvist, or unset {VARIABLE}"
        )
    chosen = choose().backend
    assert isinstance(chosen, NativeBackend)
    kernels = variants() if effort.everything and VARIABLE not in os.environ else [chosen.variant]
    forms = _forms(model, weights, dtype, effort.everything)
    rows: list[LawRow] = []
    for variant in kernels:
        for form in forms:
            announce(f"{model} as {form} on {variant}: loading")
            subject, tokenizer = load_subject(model, variant, form)
            tokens = text_tokens(tokenizer, subject.spec, effort.tokens)
            for row in check_all(model, subject, tokens, effort, announce):
                rows.append(replace(row, dtype=form, kernels=variant))
                found(rows[-1])
    prints = [fingerprint(NativeBackend(variant)) for variant in kernels]
    return Report(model, "+".join(prints), tuple(rows))


def _forms(model: str, weights: str, dtype: str, everything: bool) -> list[str]:
    """How the weights are held, one after the other: packed, bfloat16, float32."""
    spec, checkpoint, _ = open_model(resolve(model))
    backend = choose().backend
    if weights != "auto" or dtype != "auto":
        return [held_as(spec, checkpoint, backend, weights, dtype).name]
    packed = [PACKED] if can_pack(spec, checkpoint) else []
    if everything:
        return [*packed, BFLOAT16.name, FLOAT32.name]
    return packed or [BFLOAT16.name]


def load_subject(
    model: str, variant: str, form: str | DType, kv_dtype: DType | None = None
) -> tuple[Subject, Tokenizer]:
    """A model's weights on one kernel variant, held as ``form`` (packed or an element type), and its tokenizer."""
    source = resolve(model)
    spec, checkpoint, tokenizer = open_model(source)
    spec = fix_context(spec, default_context(spec))
    backend = NativeBackend(variant)
    held = held_as(spec, checkpoint, backend, form if isinstance(form, str) else form.name)
    held.require_memory(source.name)
    weights = load_weights(spec, checkpoint, backend, held.dtype, packed=held.packed)

    def threads(count: int | None) -> Backend:
        return NativeBackend(variant, count)

    return Subject(source.name, spec, weights, kv_dtype or held.dtype, threads), tokenizer


def text_tokens(tokenizer: Tokenizer, spec: ModelSpec, count: int) -> list[int]:
    """``count`` tokens of English prose that every Python carries, past every window of the model where it fits."""
    from pydoc_data.topics import topics

    windows = [layer.attention.window or 0 for layer in spec.layers if isinstance(layer.attention, Attention)]
    widest = max(windows, default=0)
    count = min(max(count, widest + 200 if widest <= 1024 else 0), spec.max_position)
    text = "\n".join(topics[name] for name in sorted(topics))[: count * 12]
    tokens = tokenizer.encode(text)[:count]
    if len(tokens) < count:
        raise VerifyError(f"the text gives {len(tokens)} tokens where {count} are needed")
    return tokens


def check_all(
    model: str, subject: Subject, tokens: Sequence[int], effort: Effort, announce: Announce
) -> Iterator[LawRow]:
    """Every row of one subject, as it is found."""
    laws = Laws(subject, tokens)
    for path in paths(subject.spec, len(tokens), full=effort.everything):
        announce(f"{path.law}: {path.name}")
        yield laws.check(path)
    announce("path independence: two processes")
    yield _other_process(model, subject, tokens, laws.baseline())
    announce("by value: float64 judge")
    last = len(tokens) - 1
    judged = sorted({round(last * i / (effort.judged - 1)) for i in range(effort.judged)})
    yield check_value(subject, tokens, judged)


def _other_process(model: str, subject: Subject, tokens: Sequence[int], expected: dict[int, bytes]) -> LawRow:
    """The same tokens in a process of its own, cut in pieces of 77."""
    backend = subject.threads(None)
    assert isinstance(backend, NativeBackend)
    form = PACKED if subject.weights.packed else subject.weights.dtype.name
    job = {"model": model, "variant": backend.variant, "form": form, "tokens": list(tokens)}
    child = subprocess.run(
        [sys.executable, "-m", "kvist.verify.run"], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    law, name = "path independence", "two processes"
    if child.returncode != 0:
        reason = child.stderr.strip().splitlines()[-1:] or ["no message"]
        return LawRow(law, name, 0, None, detail=f"not exercised: the other process failed: {reason[0]}")
    answer = json.loads(child.stdout)
    if answer["pid"] == os.getpid():
        return LawRow(law, name, 0, None, detail="not exercised: it was the same process")
    digests = [bytes.fromhex(text) for text in answer["digests"]]
    wrong = [p for p, digest in enumerate(digests) if digest != expected[p]]
    if wrong:
        difference = FirstDifference(wrong[0], None, "in the other process", float("nan"), len(wrong))
        return LawRow(law, name, len(digests), False, difference)
    return LawRow(law, name, len(digests), len(digests) == len(tokens))


def _child() -> None:
    job = json.loads(sys.stdin.read())
    subject, _ = load_subject(job["model"], job["variant"], job["form"])
    course = Course(subject, length=len(job["tokens"]), step_tokens=len(job["tokens"]))
    lane = in_chunks(77)(course, job["tokens"])
    digests = [lane.digests[p].hex() for p in range(len(job["tokens"]))]
    print(json.dumps({"pid": os.getpid(), "digests": digests}))


if __name__ == "__main__":
    _child()
