"""The vocabulary of the family table: how fields of a config become layers. Records only; cache_spec.py applies them.

A pattern says which kind each layer is. Kinds: full, swa, chunk, none, shared, and the kind of the row's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "attn_config.kv_n_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels")
MAX_POSITION = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_sequence_length",
    "max_target_positions",
)
WINDOW = ("sliding_window", "sliding_window_size", "attention_window_size")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "expert_count")
MTP = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")


@dataclass(frozen=True, slots=True)
class Every:
    """All layers are of one kind."""

    kind: str = "full"


@dataclass(frozen=True, slots=True)
class Windowed:
    """All layers are windowed where the config sets a window.

    ``gate``: a flag that must be true for the window to count (absent: false). ``from_layer``: the field with the first
    windowed layer.
    """

    gate: str | None = None
    from_layer: str | None = None


@dataclass(frozen=True, slots=True)
class Periodic:
    """The last of every ``period`` layers is ``kind``, the others ``other``; ``fields`` may give another period."""

    period: int
    fields: tuple[str, ...] = ("sliding_window_pattern", "_sliding_window_pattern")
    kind: str = "full"
    other: str = "swa"


@dataclass(frozen=True, slots=True)
class Offset:
    """Layer i is ``kind`` when i % period == offset, both from fields."""

    period: str
    offset: str
    kind: str = "full"
    other: str = "none"


@dataclass(frozen=True, slots=True)
class Indexed:
    """The layers in the list ``field`` (dotted path, numbered from ``base``) are ``kind``, the others ``other``."""

    field: str
    base: int = 0
    kind: str = "full"
    other: str = "none"


@dataclass(frozen=True, slots=True)
class Coded:
    """The list or string ``field`` holds one code per layer; ``fallback`` is the pattern where it is absent.

    ``cycled``: the codes repeat until every layer has one.
    """

    field: str
    kinds: Mapping[int | str, str]
    cycled: bool = False
    fallback: Periodic | None = None


@dataclass(frozen=True, slots=True)
class Blocks:
    """A list with one entry per layer that says how many query heads share a kv head, or that nothing is kept."""

    field: str


@dataclass(frozen=True, slots=True)
class Halves:
    """Two halves: states and windows alternate in the first, one full layer follows, and the rest reads its rows."""

    step: str


Pattern = Every | Windowed | Periodic | Offset | Indexed | Coded | Blocks | Halves


@dataclass(frozen=True, slots=True)
class StateRule:
    """A recurrent state from fields: state = product of ``state``, channels = sum over ``channels`` of products.

    Each item is a field name (dotted path allowed), a number, or a tuple of names tried in turn. ``defaults`` hold what
    the architecture's class gives to fields that configs leave out. ``kernel`` is the convolution's length field.
    """

    kind: str
    state: tuple[str | int, ...] = ()
    channels: tuple[tuple[str | int, ...], ...] = ()
    kernel: str | int = 1
    dtype_fields: tuple[str, ...] = ("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    defaults: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class IndexRule:
    """A sparse-attention indexer: the width field, and a list that says which layers have one (value ``marks``)."""

    width: str
    layers: str | None = None
    marks: int | str = 1


@dataclass(frozen=True, slots=True)
class CrossRule:
    """Cross attention: on every layer (``layers`` None) or on those of a list, over ``tokens`` source tokens."""

    tokens: str | int | None = None
    layers: str | None = None


@dataclass(frozen=True, slots=True)
class CacheRule:
    """How an architecture's config becomes what its layers keep. Tuples of names are tried in turn.

    ``head_dim_given``: the class has a width of its own, so hidden / heads would be a wrong guess. ``width_factor``:
    heads divide this many times the hidden size. ``one_kv_head``: (flag, default, exception flag): one kv head when
    set. ``kv_heads_if``: the flag without which kv head fields do not count. ``window_given``: without a window field
    the size cannot be known. ``overrides``: kind -> (head_dim, v_head_dim, kv heads) fields, the last only where the
    flag ``override_if`` is set. ``shared_tail``: the field that counts last layers reading earlier rows.
    ``share_every``: (flag, factor) fields. ``vectors``: the list of compression ratios of DeepSeek-V4.
    """

    pattern: Pattern = Every()
    layers: tuple[str, ...] = LAYERS
    heads: tuple[str, ...] = HEADS
    kv_heads: tuple[str, ...] = KV_HEADS
    hidden: tuple[str, ...] = HIDDEN
    head_dim: tuple[str, ...] = HEAD_DIM
    v_head_dim: tuple[str, ...] = ()
    head_dim_given: bool = False
    width_factor: int = 1
    one_kv_head: tuple[str, bool, str | None] | None = None
    kv_heads_if: str | None = None
    window: tuple[str, ...] = WINDOW
    window_given: bool = False
    chunk: str | None = None
    latent: bool = False
    sublayers: int = 1
    state: StateRule | None = None
    parallel_state: bool = False
    index: IndexRule | None = None
    cross: CrossRule | None = None
    overrides: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    override_if: str | None = None
    shared_tail: str | None = None
    share_every: tuple[str, str] | None = None
    vectors: str | None = None
    encoder_only: bool = False
    mtp: tuple[str, ...] = MTP


MAMBA1 = StateRule(
    "mamba1",
    state=("mamba_expand", "hidden_size", "mamba_d_state"),
    channels=(("mamba_expand", "hidden_size"),),
    kernel="mamba_d_conv",
    defaults={"mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4},
)
MAMBA2_GRANITE = StateRule(
    "mamba2",
    state=("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    channels=(("mamba_n_heads", "mamba_d_head"), (2, "mamba_n_groups", "mamba_d_state")),
    kernel="mamba_d_conv",
)
MAMBA2_FALCON = StateRule(
    "mamba2",
    state=("mamba_d_ssm", "mamba_d_state"),
    channels=(("mamba_d_ssm",), (2, "mamba_n_groups", "mamba_d_state")),
    kernel="mamba_d_conv",
)
MAMBA2_NEMOTRON = StateRule(
    "mamba2",
    state=("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    channels=(("mamba_num_heads", "mamba_head_dim"), (2, "n_groups", "ssm_state_size")),
    kernel="conv_kernel",
)
MAMBA2_ZAMBA = StateRule(
    "mamba2",
    state=("mamba_expand", "hidden_size", "mamba_d_state"),
    channels=(("mamba_expand", "hidden_size"), (2, "mamba_ngroups", "mamba_d_state")),
    kernel="mamba_d_conv",
)
GATED_DELTA = StateRule(
    "gdn",
    state=("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    channels=(
        (2, "linear_num_key_heads", "linear_key_head_dim"),
        ("linear_num_value_heads", "linear_value_head_dim"),
    ),
    kernel="linear_conv_kernel_dim",
)
KIMI_DELTA = StateRule(
    "kda",
    state=("linear_attn_config.num_heads", "linear_attn_config.head_dim", "linear_attn_config.head_dim"),
    channels=((3, "linear_attn_config.num_heads", "linear_attn_config.head_dim"),),
    kernel="linear_attn_config.short_conv_kernel_size",
)
LIGHTNING = StateRule("lightning", state=("num_attention_heads", "head_dim", "head_dim"))
SHORT_CONV = StateRule("shortconv", channels=(("hidden_size",),), kernel="conv_L_cache")
RG_LRU = StateRule("rglru", state=("lru_width",), channels=(("lru_width",),), kernel="conv1d_width")
