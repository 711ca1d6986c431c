"""A mixture of experts as operations: route each token, run what it chose, add it up in the order of choice."""

from __future__ import annotations

from kvist.kernels.ops import Combine, GroupedLinear, Linear, NormWeight, Op, Route
from kvist.model.buffers import Buffers
from kvist.model.weights import ExpertWeights
from kvist.spec.model import MixtureOfExperts


def choose_experts(
    at: str, mixture: MixtureOfExperts, w: ExpertWeights, norm: NormWeight | None, b: Buffers, scale: float
) -> tuple[list[Op], list[Op]]:
    """(what reads the stream, what adds to it) of one layer's experts; ``scale`` is that of the whole branch."""
    k, width = mixture.top_k, mixture.intermediate_size
    scores, ids, gates = b.scores[:, : mixture.num_experts], b.ids[:, :k], b.gates[:, :k]
    gated, out = b.chosen_gated[:, : k * width], b.chosen_out[:, : k * b.x.shape[1]]
    read: list[Op] = [
        Linear(at + "router", b.x, w.router, scores, norm=norm),
        Route(
            at + "route",
            scores,
            ids,
            gates,
            k,
            scoring=mixture.scoring,
            groups=mixture.groups,
            top_groups=mixture.top_groups,
            group_score=mixture.group_score,
            bias=w.bias,
            normalise=mixture.normalise,
            scale=mixture.scale * scale,
        ),
        GroupedLinear(
            at + "experts up",
            b.x,
            w.gate_up,
            gated,
            k,
            ids,
            epilogue="glu",
            norm=norm,
            activation=mixture.activation,
        ),
    ]
    add: list[Op] = [
        GroupedLinear(at + "experts down", gated, w.down, out, k, ids, source_stride=width),
        Combine(at + "experts", out, gates, b.x),
    ]
    return read, add
