"""Products of several weights, the choice among experts and the sum of their answers, on every kernel variant."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.kernels.native import NativeBackend, variants
from kvist.kernels.ops import Backend, Combine, GroupedLinear, Linear, NormWeight, Op, Route, Step, Weight, torch_dtype
from kvist.kernels.reference import ReferenceBackend
from kvist.verify.compare import (
    POINTWISE,
    assert_bits_equal,
    assert_close,
    largest_row_error,
    linear_bound,
    rounding_bound,
)

WEIGHTS = pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=lambda d: d.name)
NATIVE = [NativeBackend(name, 2) for name in variants()]
BACKENDS = pytest.mark.parametrize("backend", [*NATIVE, ReferenceBackend()], ids=lambda backend: backend.name)


def values(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step_of(tokens: int) -> Step:
    positions = torch.arange(tokens, dtype=torch.int32)
    none = torch.zeros(0, dtype=torch.int32)
    return Step(torch.zeros_like(positions), positions, torch.tensor([0, tokens], dtype=torch.int32), (), none)


def filled(backend: Backend, dtype: DType, count: int, n: int, k: int, glu: bool = False) -> tuple[Weight, ...]:
    weights = tuple(backend.weight(n, k, dtype, glu) for _ in range(count))
    for index, weight in enumerate(weights):
        weight.fill(0, values(100 + index, n, k) / math.sqrt(k))
    return weights


def expected(op: GroupedLinear, ids: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """float64 [T, slots, M], token by token; what enters the product is rounded to the weights' type."""
    k = op.weights[0].k
    rows = []
    for t in range(tokens):
        for slot in range(op.slots):
            weight = op.weights[slot if ids is None else int(ids[t, slot])]
            x = op.source[t, slot * op.source_stride :][:k].double()
            if op.norm is not None:
                x = x / torch.sqrt(x.square().mean() + op.norm.eps) * op.norm.weight.double()
            y = weight.rows(torch.arange(weight.n)).double() @ x.float().to(torch_dtype(weight.dtype)).double()
            if op.epilogue == "glu":
                gate, up = y.chunk(2)
                y = torch.nn.functional.silu(gate) * up
            rows.append(torch.nn.functional.gelu(y) if op.epilogue == "act" else y * op.scale)
    return torch.stack(rows).view(tokens, op.slots, -1)


FORMS = {
    "store": {"scale": 0.5},
    "glu": {"epilogue": "glu"},
    "act": {"epilogue": "act", "activation": "gelu"},
    "behind a norm": {"norm": True},
    "a part of the row for each slot": {"strided": True},
    "one weight for each slot": {"strided": True, "fixed": True},
}


@BACKENDS
@WEIGHTS
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 31])
def test_grouped(backend: Backend, dtype: DType, form: str, tokens: int) -> None:
    experts, slots, n, k = 7, 3, 38, 46
    settings = dict(FORMS[form])
    strided, fixed = settings.pop("strided", False), settings.pop("fixed", False)
    norm = NormWeight(1 + 0.3 * values(1, k), 1e-5) if settings.pop("norm", False) else None
    weights = filled(backend, dtype, slots if fixed else experts, n, k, form == "glu")
    stride = k + 4 if strided else 0
    source = values(2, tokens, (slots - 1) * stride + k)
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:slots] for _ in range(tokens)]).to(torch.int32)
    ids = None if fixed else chosen
    rounded = form in ("glu", "act")
    width = n // 2 if form == "glu" else n
    kind = torch_dtype(dtype) if rounded else torch.float32
    out = torch.full((tokens + 1, slots * width + 5), torch.nan, dtype=kind)[:, : slots * width]
    op = GroupedLinear("grouped", source, weights, out, slots, ids, stride, norm=norm, **settings)  # type: ignore[arg-type]
    backend.compile([op]).run(step_of(tokens))
    right = expected(op, ids, tokens).flatten(1)
    # What a norm leaves may round to a neighbour of what float64 rounds to.
    bound = linear_bound(k) + (rounding_bound(dtype.name) if rounded or norm else 0)
    assert_close(out[:tokens], right, bound)
    assert_close(out[:tokens], right, 4 * bound, measure=largest_row_error)
    assert out[tokens:].isnan().all()


@pytest.mark.parametrize("backend", NATIVE, ids=lambda backend: backend.name)
@WEIGHTS
@pytest.mark.parametrize("glu", [False, True])
def test_a_row_depends_on_itself_alone(backend: NativeBackend, dtype: DType, glu: bool) -> None:
    """Alone, among many, all at one expert, in another order, by one thread: the same bits as one plain product."""
    experts, slots, n, k, tokens = 5, 2, 70, 64, 61
    weights = filled(backend, dtype, experts, n, k, glu)
    width = n // 2 if glu else n
    source = values(3, tokens, k)
    ids = torch.stack([torch.arange(tokens) % experts, (torch.arange(tokens) // 3 + 1) % experts], 1).to(torch.int32)

    def run(source: torch.Tensor, ids: torch.Tensor, by: NativeBackend = backend) -> torch.Tensor:
        out = torch.full((len(source), slots * width), torch.nan)
        op = GroupedLinear("grouped", source, weights, out, slots, ids, epilogue="glu" if glu else "store")
        by.compile([op]).run(step_of(len(source)))
        return out.view(len(source), slots, width)

    right = run(source, ids)
    for expert, weight in enumerate(weights):
        out = torch.empty(tokens, width)
        backend.compile([Linear("plain", source, weight, out, epilogue="glu" if glu else "store")]).run(step_of(tokens))
        at = torch.nonzero(ids == expert)
        assert_bits_equal(right[at[:, 0], at[:, 1]], out[at[:, 0]], f"expert {expert} as a plain product")
    for row in (0, 17, tokens - 1):
        assert_bits_equal(run(source[row : row + 1], ids[row : row + 1])[0], right[row], f"row {row} alone")
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(0))
    assert_bits_equal(run(source[order], ids[order].contiguous()), right[order], "in another order")
    assert_bits_equal(run(source, ids, NativeBackend(backend.variant, 3)), right, "three threads")
    crowded = torch.full_like(ids, 3)
    crowded[9] = ids[9]
    assert_bits_equal(run(source, crowded)[9], right[9], "all others at one expert")


@BACKENDS
def test_no_rows_and_many_experts(backend: Backend) -> None:
    weights = filled(backend, FLOAT32, 256, 16, 8)
    ids = torch.zeros(4, 8, dtype=torch.int32)
    ids[0] = torch.tensor([255, 3, 0, 128, 9, 254, 77, 1])
    out = torch.full((4, 8 * 16), torch.nan)
    op = GroupedLinear("grouped", values(4, 4, 8), weights, out, 8, ids)
    executor = backend.compile([op])
    executor.run(step_of(0))
    assert out.isnan().all()
    executor.run(step_of(1))
    assert_close(out[:1], expected(op, ids, 1).flatten(1), linear_bound(8))
    assert out[1:].isnan().all()
    small = (
        Route("r", values(5, 4, 8), ids[:, :2], torch.zeros(4, 2), 2),
        Combine("c", out, torch.zeros(4, 8), out[:, :16]),
    )
    backend.compile(list(small)).run(step_of(0))


def chosen(scores: list[float], op: Route) -> tuple[list[int], list[float]]:
    """The choice for one token in plain Python, from its scores in float64."""
    bias = op.bias.tolist() if op.bias is not None else [0.0] * len(scores)
    choice = [score + extra for score, extra in zip(scores, bias, strict=True)]
    experts = list(range(len(scores)))
    if op.groups > 1:
        each = len(scores) // op.groups
        best = []
        for group in range(op.groups):
            inside = sorted(choice[group * each : (group + 1) * each], reverse=True)
            best.append(inside[0] if op.group_score == "max" else inside[0] + inside[1])
        groups = sorted(range(op.groups), key=lambda group: -best[group])[: op.top_groups]
        experts = [expert for expert in experts if expert // each in groups]
    ids = sorted(experts, key=lambda expert: -choice[expert])[: op.top_k]
    gates = [scores[expert] for expert in ids]
    total = sum(gates) + 1e-20 if op.normalise else 1.0
    return ids, [gate / total * op.scale for gate in gates]


routes = st.fixed_dictionaries(
    {
        "scoring": st.sampled_from(["softmax", "sigmoid"]),
        "grouping": st.sampled_from([(1, 1, "max"), (4, 2, "max"), (4, 2, "top2"), (2, 1, "top2"), (8, 8, "max")]),
        "biased": st.booleans(),
        "normalise": st.booleans(),
        "scale": st.sampled_from([1.0, 2.5]),
        "top_k": st.integers(1, 8),
        "experts": st.sampled_from([16, 24, 64, 256]),
        "tokens": st.integers(0, 9),
        "seed": st.integers(0, 99),
    }
)


@BACKENDS
@given(case=routes)
@settings(max_examples=50, deadline=None)
def test_route(backend: Backend, case: dict[str, object]) -> None:
    grouping, experts, tokens, seed = case["grouping"], case["experts"], case["tokens"], case["seed"]
    groups, top_groups, group_score = grouping  # type: ignore[misc]
    top_k = min(case["top_k"], experts // groups * top_groups)  # type: ignore[operator, call-overload]
    # Scores on a grid: far enough apart that no rounding changes their order, and some of them equal.
    logits = (values(seed, tokens, experts) * 8).round() / 4  # type: ignore[arg-type]
    bias = (values(1, experts) * 16).round() / 64 if case["biased"] else None  # type: ignore[arg-type]
    ids, gates = torch.full((10, top_k), -1, dtype=torch.int32), torch.full((10, top_k), torch.nan)
    op = Route(
        "route",
        logits,
        ids,
        gates,
        top_k,
        case["scoring"],
        groups,
        top_groups,
        group_score,  # type: ignore[arg-type]
        None,
        case["normalise"],
        case["scale"],  # type: ignore[arg-type]
    )
    exact = logits.double().softmax(-1) if op.scoring == "softmax" else logits.double().sigmoid()
    if bias is not None:  # only where the sum with a bias is no near tie
        sums = (exact + bias.double()).sort(-1).values
        op = replace(op, bias=bias if tokens and float((sums[:, 1:] - sums[:, :-1]).min()) > 1e-6 else None)
    backend.compile([op]).run(step_of(tokens))
    for t in range(tokens):
        right_ids, right_gates = chosen(exact[t].tolist(), op)
        if op.group_score == "max" or op.groups == 1:
            assert ids[t].tolist() == right_ids
            assert_close(gates[t], torch.tensor(right_gates, dtype=torch.float64), POINTWISE)
        else:  # sums of two may tie by a rounding: what is chosen must still be what its own scores say
            assert sorted(set(ids[t].tolist())) == sorted(ids[t].tolist())
    assert (ids[tokens:] == -1).all() and gates[tokens:].isnan().all()


@BACKENDS
def test_route_of_groups_by_their_two_best(backend: Backend) -> None:
    """DeepSeek-V3's rule on numbers that tell it from the best alone: sigmoid, bias only to choose, normalised."""
    wanted = torch.tensor([[0.9, 0.1, 0.7, 0.6, 0.5, 0.65, 0.2, 0.3]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0])
    ids, gates = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3)
    op = Route("route", wanted.logit(), ids, gates, 3, "sigmoid", 4, 2, "top2", bias, True, 2.5)
    backend.compile([op]).run(step_of(1))
    # Groups' sums: 1.0, 1.3, 1.45, 0.5. Eligible are 2 to 5, with choice scores 0.7, 0.6, 0.8, 0.65.
    assert ids[0].tolist() == [4, 2, 5]
    assert_close(gates[0], torch.tensor([0.5, 0.7, 0.65], dtype=torch.float64) / 1.85 * 2.5, POINTWISE)
    by_best = replace(op, group_score="max")
    backend.compile([by_best]).run(step_of(1))
    assert ids[0].tolist() == [0, 4, 5]


@BACKENDS
def test_route_with_ties_and_without_numbers(backend: Backend) -> None:
    """Ties go to the lower index; NaN ranks last, even behind -inf of a bias; ids are always distinct and in range."""
    ids, gates = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 4)
    logits = torch.zeros(3, 8)
    logits[1] = torch.nan
    logits[2, 3] = torch.nan
    backend.compile([Route("route", logits, ids, gates, 4, "sigmoid", 2, 1)]).run(step_of(3))
    assert ids[0].tolist() == [0, 1, 2, 3] and ids[1].tolist() == [0, 1, 2, 3]
    assert gates[1].isnan().all() and gates[0].tolist() == [0.5] * 4
    assert ids[2].tolist() == [0, 1, 2, 3]
    assert gates[2, :3].tolist() == [0.5] * 3 and gates[2, 3].isnan()


@BACKENDS
@pytest.mark.parametrize("width", [5, 64, 1030])
@pytest.mark.parametrize("ranks", [1, 6])
def test_combine(backend: Backend, width: int, ranks: int) -> None:
    tokens = 9
    source, gates, start = values(6, tokens, ranks * width), values(7, tokens, ranks), values(8, tokens + 1, width)
    out = start.clone()
    backend.compile([Combine("combine", source, gates, out)]).run(step_of(tokens))
    total = torch.einsum("tr,trw->tw", gates.double(), source.double().view(tokens, ranks, width))
    assert_close(out[:tokens], start[:tokens].double() + total, POINTWISE)
    assert_bits_equal(out[tokens:], start[tokens:], "rows beyond the step")
    # Rank by rank: the order of the ranks reaches the bits, that of the tokens does not.
    again = start.flip(0)[1:].clone()
    backend.compile([Combine("combine", source.flip(0), gates.flip(0), again)]).run(step_of(tokens))
    assert_bits_equal(again.flip(0), out[:tokens], "tokens in another order")


@BACKENDS
def test_refusals(backend: Backend) -> None:
    weights = filled(backend, FLOAT32, 2, 4, 6)
    good = GroupedLinear("g", torch.zeros(3, 6), weights, torch.zeros(3, 8), 2, torch.zeros(3, 2, dtype=torch.int32))
    assert backend.refuses(good) is None
    odd = (*weights, backend.weight(5, 6, FLOAT32))
    cases: list[tuple[Op, str]] = [
        (replace(good, weights=odd), "differ in shape"),
        (replace(good, weights=()), "multiply nothing"),
        (replace(good, ids=None, weights=weights[:1]), "as many weights"),
        (replace(good, ids=torch.zeros(3, 2, dtype=torch.int64)), "not int32"),
        (replace(good, epilogue="add"), "use store, glu or act"),
        (replace(good, epilogue="glu"), "gate rows"),
        (replace(good, source_stride=6), "end before slot 1"),
        (replace(good, out=torch.zeros(3, 9)), "do not fit an output of 9"),
        (replace(good, norm=NormWeight(torch.ones(5), 1e-6)), "as wide as itself"),
        (Route("r", torch.zeros(1, 8), torch.zeros(1, 9, dtype=torch.int32), torch.zeros(1, 9), 9), "9 of 8 eligible"),
        (
            Route("r", torch.zeros(1, 8), torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3), 3, groups=3),
            "3 groups",
        ),
        (
            Route("r", torch.zeros(1, 8), torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 3), 3, groups=4),
            "3 of 2 eligible",
        ),
        (Route("r", torch.zeros(1, 8), torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, 3), 3), "3 ranks"),
        (Combine("c", torch.zeros(1, 7), torch.zeros(1, 2), torch.zeros(1, 4)), "are not 2 ranks of 4"),
    ]
    for op, reason in cases:
        assert reason in str(backend.refuses(op)), reason
        with pytest.raises(KernelError, match=op.name):
            backend.compile([op])
