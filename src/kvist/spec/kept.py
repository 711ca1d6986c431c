"""What the layers of a model leave behind, as records: all that a planner needs, and nothing that only running needs.

A layer is a kind (a word for tables) and its parts; most layers have one part, some several (attention beside a
recurrent state, a latent beside the keys of a sparse-attention indexer). Element counts are exact; types come later.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KeyValueRows:
    """A key and a value per kv head and token.

    ``window``: only the newest ``window`` tokens are visible. ``chunk``: tokens see their own chunk of that size only.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    chunk: int | None = None

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def bound(self) -> int | None:
        """The most tokens that any query still sees, or None."""
        return self.window if self.window is not None else self.chunk


@dataclass(frozen=True, slots=True)
class LatentRows:
    """Multi-head latent attention: one latent and one rotated key per token, whatever the number of heads.

    The head widths are kept because some engines store the expanded keys and values instead.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int
    num_heads: int
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None

    @property
    def elements(self) -> int:
        """Elements per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class VectorRows:
    """One vector that serves as key and value, kept for a ``window`` or for every ``stride``-th token."""

    width: int
    window: int | None = None
    stride: int = 1


@dataclass(frozen=True, slots=True)
class IndexRows:
    """One key of a sparse-attention indexer for every ``stride`` tokens, shared by its heads."""

    width: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class StateRows:
    """A recurrent state of fixed size per sequence: a matrix (``state`` elements) and the tail of a convolution.

    ``conv_channels`` times ``conv_kernel`` - 1 elements wait in the convolution. ``split_heads`` (heads of keys, of
    values) is what tensor parallelism divides.
    """

    state: int
    conv_channels: int
    conv_kernel: int
    state_dtype: str | None = None

    @property
    def conv(self) -> int:
        """Elements of the convolution's tail."""
        return self.conv_channels * (self.conv_kernel - 1)


@dataclass(frozen=True, slots=True)
class CrossRows:
    """Keys and values of another sequence (an encoder, an image): ``tokens`` of them, None when the input decides."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    tokens: int | None = None

    @property
    def elements(self) -> int:
        """Elements per source token."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


Part = KeyValueRows | LatentRows | VectorRows | IndexRows | StateRows | CrossRows


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """What one layer keeps. ``shared_with`` is the layer whose rows it reads instead of keeping its own.

    ``mha_elements``: what plain multi-head attention with these heads would keep per token (0 for other layers).
    """

    kind: str
    parts: tuple[Part, ...] = ()
    shared_with: int | None = None
    mha_elements: int = 0


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What a model keeps per layer, and where each fact that was not in its config came from.

    ``mtp_layers`` extra layers like ``mtp_layer`` exist and are only used for multi-token prediction. ``weights_bytes``
    is None when the config does not say enough. ``parameters`` is the exact count, and ``vectors`` those of them in
    norms and biases; None where only an estimate can be made.
    """

    architecture: str
    family: str
    layers: tuple[CacheLayer, ...]
    num_heads: int
    max_position: int | None
    dtype: str | None
    dtype_source: str
    runnable: bool
    mtp_layers: int = 0
    mtp_layer: CacheLayer | None = None
    encoder_only: bool = False
    guess: bool = False
    weights_bytes: int | None = None
    weights_source: str = "unknown"
    parameters: int | None = None
    vectors: int = 0
    assumed: tuple[str, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())

    @property
    def num_layers(self) -> int:
        """How many layers, those that keep nothing included."""
        return len(self.layers)
