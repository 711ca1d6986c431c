"""The feed forward of each layer that a config.json describes: dense, or a mixture of experts."""

from __future__ import annotations

from kvist.base.errors import BadValue
from kvist.spec.facts import DecoderFacts, ExpertFacts, Flag
from kvist.spec.model import FeedForward, MixtureOfExperts
from kvist.spec.read import Fields

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
_ACTIVATION = ("hidden_activation", "hidden_act", "activation_function", "activation")
_INNER = ("intermediate_size", "n_inner", "ffn_hidden_size")
_METHOD = "topk_method"


def is_set(fields: Fields, flag: Flag) -> bool:
    """Whether ``flag`` holds in this config."""
    return flag if isinstance(flag, bool) else fields.flag(flag[0], default=flag[1])


def feed_forwards(
    facts: DecoderFacts, fields: Fields, num_layers: int, hidden: int
) -> list[FeedForward | MixtureOfExperts]:
    """One for each layer. MissingField, WrongType or BadValue with the field's name."""
    activation = _activation(fields, facts)
    sparse = _sparse_layers(fields, num_layers) if facts.experts is not None else [False] * num_layers
    dense: FeedForward | None = None
    if not all(sparse):
        inner = fields.maybe_integer(*_INNER, high=2**24)
        if inner is None and facts.ffn_factor is None:
            raise fields.missing(*_INNER)
        width = inner or hidden * (facts.ffn_factor or 1)
        dense = FeedForward(width, activation, is_set(fields, facts.ffn_bias), facts.gated)
    mixture = _mixture(facts.experts, fields, activation) if facts.experts is not None and any(sparse) else None
    chosen = [mixture if is_sparse else dense for is_sparse in sparse]
    return [feed for feed in chosen if feed is not None]


def _sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers have experts: those behind the first dense ones, at every step, unless a list says otherwise."""
    words = fields.maybe_list("mlp_layer_types", length=num_layers)
    for index, word in enumerate(words or []):
        if word not in ("dense", "sparse"):
            raise BadValue(f"{fields.where}: mlp_layer_types[{index}] = {word!r}; known are dense, sparse")
    if words is not None:
        return [word == "sparse" for word in words]
    first = fields.maybe_integer("first_k_dense_replace", low=0, high=10_000) or 0
    step = fields.maybe_integer("decoder_sparse_step", high=10_000) or 1
    listed = fields.maybe_list("mlp_only_layers") or []
    dense = {fields.as_integer(f"mlp_only_layers[{i}]", item, 0, num_layers - 1) for i, item in enumerate(listed)}
    return [i >= first and (i + 1) % step == 0 and i not in dense for i in range(num_layers)]


def _mixture(facts: ExpertFacts, fields: Fields, activation: str) -> MixtureOfExperts:
    count = fields.integer(*facts.count, high=2**16)
    top_k = fields.integer("num_experts_per_tok", high=count)
    width = fields.integer(*facts.width, high=2**24)
    shared = (fields.maybe_integer(facts.shared, low=0, high=1024) or 0) if facts.shared else 0
    method = fields.maybe_text(_METHOD) or next(iter(facts.methods))
    if method not in facts.methods:
        raise BadValue(f"{fields.where}: {_METHOD} {method!r} is not supported; use one of {', '.join(facts.methods)}")
    scoring = fields.maybe_text("scoring_func") or facts.scoring
    if scoring != facts.scoring:
        raise BadValue(f"{fields.where}: scoring_func {scoring!r} is not supported here; {facts.scoring} is")
    group_score = facts.methods[method]
    groups, top_groups = 1, 1
    if group_score is not None:
        groups, top_groups = _groups(fields, count, top_k, group_score)
    scale = fields.number(facts.scale, high=1e6) if facts.scale else 1.0
    return MixtureOfExperts(
        num_experts=count,
        top_k=top_k,
        intermediate_size=width,
        activation=activation,
        shared_size=shared * width,
        scoring=scoring,
        groups=groups,
        top_groups=top_groups,
        group_score=group_score or "max",
        correction_bias=facts.correction_bias,
        normalise=is_set(fields, facts.normalise),
        scale=scale,
    )


def _groups(fields: Fields, count: int, top_k: int, group_score: str) -> tuple[int, int]:
    groups = fields.integer("n_group", high=count)
    chosen = fields.integer("topk_group", high=groups)
    if count % groups:
        raise BadValue(f"{fields.where}: {count} experts do not divide into n_group = {groups} groups")
    size = count // groups
    if top_k > chosen * size:
        raise BadValue(
            f"{fields.where}: num_experts_per_tok = {top_k}, but topk_group = {chosen} groups hold"
            f" {chosen * size} experts"
        )
    if group_score == "top2" and size < 2:
        raise BadValue(f"{fields.where}: groups of {size} expert have no two best to be scored by; use fewer groups")
    return groups, chosen


def _activation(fields: Fields, facts: DecoderFacts) -> str:
    name = fields.maybe_text(*_ACTIVATION)
    if name is None:
        return facts.activation
    if name not in _ACTIVATIONS:
        raise BadValue(f"{fields.where}: activation {name!r} is not supported; use one of {', '.join(_ACTIVATIONS)}")
    return "gelu_tanh" if name == "gelu" and facts.gelu_is_tanh else _ACTIVATIONS[name]
