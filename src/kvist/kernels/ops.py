"""The contract of every operation, as records; no implementation.

A decoder is a list of these records over a handful of buffers. Backends execute them: ``reference`` one by one in
torch, ``native`` the whole list in one call. Because an operation is data, the verifier can run a model operation by
operation, look at every buffer, or put another operation in its place.

Axes: T tokens of the step (flattened over requests), B requests, H query heads, G kv heads, D head width, R rows whose
logits are wanted, N blocks, P slots per block, M the most blocks of any request in the step.

Types: ``x`` (the residual stream) and everything that is added to it is float32. What enters a product is rounded once
to the product's own type (the ``act`` type: bfloat16 for bfloat16 weights, float32 for float32 weights).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT16, FLOAT32, DType
from kvist.cache.addressing import SPLIT as SPLIT
from kvist.cache.addressing import TILE as TILE

TORCH_DTYPES: dict[str, torch.dtype] = {
    FLOAT32.name: torch.float32,
    BFLOAT16.name: torch.bfloat16,
    FLOAT16.name: torch.float16,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch element type of ``dtype``."""
    return TORCH_DTYPES[dtype.name]


class Weight(Protocol):
    """A matrix [N, K] in its backend's own form. ``glu`` weights hold a gate and an up matrix, N counts both."""

    n: int
    k: int
    dtype: DType
    glu: bool

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        ...

    def fill(self, row: int, rows: Tensor) -> None:
        """Write float32 or bfloat16 ``rows`` [n, K] as rows row..row+n. Of a glu weight, gate rows are 0..N/2."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` as float32 [len(ids), K]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class NormWeight:
    """Row-wise normalisation, float32: x / sqrt(mean(x^2) + eps) * weight; any offset is in weight.

    ``centred`` (layer norm): (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias.
    """

    weight: Tensor
    eps: float
    bias: Tensor | None = None
    centred: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LayerStore:
    """The pool's bytes of one layer: ``data`` uint8 [N, block_bytes], and how to read them.

    Block format: for each kv head g a K part then a V part. K: [P/16][D/e][16][e]; V: [P/e][Dv][e]; e is 2 for bfloat16
    (dot products take neighbours in pairs), else 1. ``group`` is the index of the block table that its layers share.
    ``value_in_key`` (latent rows [c_KV, k_R], one kv head): there is no V part; the value of a position is the first
    v_head_dim channels of its key.
    """

    data: Tensor
    dtype: DType
    block_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    group: int
    value_in_key: bool = False

    @property
    def v_stored(self) -> int:
        """Elements of a position's V part: v_head_dim, or none where the value lies in the key."""
        return 0 if self.value_in_key else self.v_head_dim


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step's arrays, made by ``engine.batch``. Requests are laid one after the other along T.

    tokens int32 [T]; positions int32 [T] (consecutive within a request); starts int32 [B+1], request b owns
    starts[b]..starts[b+1]; tables: per group int32 [B, M], position p of b stands in block tables[g][b, p // P] (-1
    where nothing is stored any more); rows int32 [R], indices into T whose logits are wanted.
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    tables: tuple[Tensor, ...]
    rows: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Embed:
    """out[t] = float32(weight[tokens[t]]) * scale, + float32(places[positions[t]]) where positions are learned."""

    name: str
    weight: Weight
    scale: float
    out: Tensor
    places: Weight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """y = act(norm(source)) @ weight.T + bias, then the epilogue.

    source: float32 [T, K] (rounded once to the weight's type, behind the ``norm`` if there is one), or, without norm,
    act type [T, K]. Packed weights round to 15 bits a block of 32 columns; their act type is float32.
    epilogue ``store``: out (float32) = y * scale. ``add``: out += y * scale. ``glu``: out (act type or float32)
    [T, N/2] = f(y_gate) * y_up, with ``activation`` f in {silu, gelu_tanh, gelu}. ``act``: out [T, N] = f(y).
    ``wanted``: source rows are source[step.rows] and out is [R, N]; ``softcap`` c then gives c * tanh(y * scale / c).
    """

    name: str
    source: Tensor
    weight: Weight
    out: Tensor
    epilogue: str = "store"
    norm: NormWeight | None = None
    bias: Tensor | None = None
    activation: str = "silu"
    wanted: bool = False
    softcap: float | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Append:
    """From qkv float32 [T, (H + G) * D + G * Dv]: norm q and k per head, rotate by the token's position, store k and v.

    ``q_norm`` and ``k_norm`` work on each head's D channels. ``cos`` and ``sin`` float32 [positions, rotary/2] are
    functions of the absolute position alone; channel i pairs with i + rotary/2; None: no rotation.
    q_out [T, H, D] (float32 when the store is float32 or float16, else bfloat16) = rotated q * scale, rounded once.
    """

    name: str
    qkv: Tensor
    q_out: Tensor
    store: LayerStore
    num_heads: int
    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None
    q_norm: NormWeight | None = None
    k_norm: NormWeight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """out[t, h] = softmax(q[t, h] . K[visible]) V[visible], in splits of 128 keys at absolute positions.

    q [T, H, D] is already scaled. The query at position p sees key j when j <= p and (window is None or j > p - window
    or j < sinks). ``softcap`` c: scores become c * tanh(score / c) before the softmax. Query head h reads kv head
    h // (H // G). Output act type or float32, [T, H * Dv]. A query that sees nothing gives zeros.
    Each split has its own maximum and sum; its probabilities exp(s - max) are rounded to bfloat16 when the store is
    bfloat16 (and the sum is of the rounded ones); splits are merged in ascending order by one formula.
    """

    name: str
    q: Tensor
    out: Tensor
    store: LayerStore
    num_heads: int
    window: int | None = None
    sinks: int = 0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AppendLatent:
    """Multi-head latent attention's append: what a token leaves behind is one row [c_KV, k_R] for all heads.

    C = v_head_dim (kv_lora_rank) and R = head_dim - C (qk_rope_head_dim) of the ``value_in_key`` store, n the width of
    a query's other part. kv float32 [T, C + R]: kv_norm(kv[:, :C]) and the rotated kv[:, C:] are stored, each element
    rounded once. q float32 [T, H * (n + R)]: the last R channels of each head are rotated. absorbed float32 [T, H * C]:
    each head's other n channels through its W_UK. q_out [T, H, C + R] (float32 when the store is float32 or float16,
    else bfloat16) = [absorbed, rotated q] * scale, rounded once. Without ``absorbed`` the n channels themselves are
    kept, for an AttendExpanded: q_out [T, H, n + R]. ``cos`` and ``sin`` float32 [positions, R/2]: channel
    i pairs with i + R/2; None: no rotation. Without ``kv_norm`` the latent is stored as it comes.
    """

    name: str
    q: Tensor
    absorbed: Tensor | None
    kv: Tensor
    q_out: Tensor
    store: LayerStore
    num_heads: int
    scale: float
    cos: Tensor | None = None
    sin: Tensor | None = None
    kv_norm: NormWeight | None = None


@dataclass(frozen=True, slots=True, eq=False)
class AttendExpanded:
    """Attend over latent rows by every head's own keys and values: fewer operations for many queries at once.

    q [T, H, n + R], scaled and rotated, in the type of an Attend's. keys: each head's W_UK [n, C], values: its W_UV
    [Dv, C], weights of the store's type (float32 or bfloat16), n and Dv multiples of 16. For head h key j is
    [W_UK c_j, k_R,j] and its value W_UV c_j, each rounded once to the store's type; out [T, H * Dv] as an Attend's.
    Another function than the absorbed form in its last bits: a run that mixes the two is outside law 1.
    """

    name: str
    q: Tensor
    out: Tensor
    store: LayerStore
    num_heads: int
    keys: tuple[Weight, ...]
    values: tuple[Weight, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GroupedLinear:
    """Several weights of one shape [N, K], one for each of ``slots`` places of a token's output.

    For token t and slot s: w = weights[s], or weights[ids[t, s]] (``ids`` int32 [T, slots]);
    x = source[t, s * source_stride : s * source_stride + K], rounded once to the weights' type (behind the ``norm``,
    which needs source_stride 0: all slots read the same row); out[t, s * M : (s + 1) * M] = epilogue(w @ x), M = N, or
    N/2 for ``glu``. Epilogues as in Linear: ``store`` (float32, times scale), ``glu`` and ``act`` (float32 or the act
    type). A row's bits depend on that row alone, not on which others chose the same weight.
    """

    name: str
    source: Tensor
    weights: tuple[Weight, ...]
    out: Tensor
    slots: int
    ids: Tensor | None = None
    source_stride: int = 0
    epilogue: str = "store"
    norm: NormWeight | None = None
    activation: str = "silu"
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Choose ``top_k`` of E experts for each token from raw router logits, scores float32 [T, E].

    ``scoring``: softmax over all E, or sigmoid. The choice score is that plus ``bias`` [E]. With ``groups`` > 1 only
    the ``top_groups`` best groups of neighbours are eligible; a group's score is its ``max`` choice score, or the sum
    of its two best (``top2``). ids int32 [T, k] in rank order: descending by choice score, ties to the lower index (NaN
    ranks last). gates float32 [T, k]: the unbiased scores, divided by (their sum + 1e-20) when ``normalise``, then
    times ``scale``.
    """

    name: str
    scores: Tensor
    ids: Tensor
    gates: Tensor
    top_k: int
    scoring: str = "softmax"
    groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    bias: Tensor | None = None
    normalise: bool = False
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Combine:
    """out[t] += sum over ranks r, ascending, of gates[t, r] * source[t, r * width : (r + 1) * width]; all float32.

    ``source`` is [T, k * width], ``gates`` [T, k], ``out`` [T, width]. The sum is one chain from rank 0 on, which is
    then added as a whole.
    """

    name: str
    source: Tensor
    gates: Tensor
    out: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class NormAdd:
    """out += norm(source); both float32 [T, width]."""

    name: str
    source: Tensor
    norm: NormWeight
    out: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Normalise:
    """out = norm(source); both float32 [T, width], and may be the same rows: a norm over several heads at once."""

    name: str
    source: Tensor
    norm: NormWeight
    out: Tensor


Op = (
    Embed
    | Linear
    | Append
    | Attend
    | AppendLatent
    | AttendExpanded
    | GroupedLinear
    | Route
    | Combine
    | NormAdd
    | Normalise
)


class Executor(Protocol):
    """A compiled list of operations."""

    ops: tuple[Op, ...]

    def run(self, step: Step) -> None:
        """Execute every operation on ``step``."""
        ...

    def run_range(self, step: Step, first: int, last: int) -> None:
        """Execute operations first..last-1 on ``step``, for those who look in between."""
        ...


class Backend(Protocol):
    """One way to execute operations."""

    name: str

    def refuses(self, op: Op) -> str | None:
        """Why this backend cannot execute ``op``; None when it can."""
        ...

    def weight(self, n: int, k: int, dtype: DType, glu: bool = False) -> Weight:
        """An empty weight in this backend's own form."""
        ...

    def compile(self, ops: list[Op], **settings: Any) -> Executor:
        """An executor of ``ops`` in order."""
        ...
