"""What reference operations are made of: weights, their product, norms, gates, rotation. No operation, no step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType
from kvist.base.errors import KernelError
from kvist.kernels.ops import NormWeight, Weight, torch_dtype

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")
SLICE = 1 << 22  # elements of a weight that are converted at once: 16 MB as float32


class ReferenceWeight:
    """A matrix [N, K] as one torch tensor in its own type; of a glu weight the rows 0..N/2 are the gate."""

    def __init__(self, n: int, k: int, dtype: DType, glu: bool = False) -> None:
        """Allocate an unfilled matrix. Raises KernelError for sizes and types that no product has."""
        if n <= 0 or k <= 0 or (glu and n % 2):
            raise KernelError(f"a {'glu ' if glu else ''}weight of {n} rows of {k} is none: rows come in whole pairs")
        if dtype not in (FLOAT32, BFLOAT16):
            raise KernelError(
                f"weights of type {dtype.name} have no product: convert to float32 or bfloat16 when loading"
            )
        self.n, self.k, self.dtype, self.glu = n, k, dtype, glu
        self.data = torch.empty(n, k, dtype=torch_dtype(dtype))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.data.numel() * self.dtype.bytes

    def fill(self, row: int, rows: Tensor) -> None:
        """Write ``rows`` [n, K] as rows row..row+n, rounded once. Raises KernelError when they do not fit."""
        if rows.dim() != 2 or rows.shape[1] != self.k or row < 0 or row + rows.shape[0] > self.n:
            raise KernelError(f"rows {list(rows.shape)} at row {row} do not fit a weight of {self.n} rows of {self.k}")
        self.data[row : row + rows.shape[0]].copy_(rows)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` as float32 [len(ids), K]."""
        return self.data[ids.long()].to(torch.float32)


def norm(x: Tensor, weight: NormWeight, compute: torch.dtype) -> Tensor:
    """RMS norm, or layer norm when centred, over the last axis, in the compute type: see ops.NormWeight."""
    x = x.to(compute)
    if weight.centred:
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + weight.eps) * weight.weight.to(compute)
    return y if weight.bias is None else y + weight.bias.to(compute)


def activate(x: Tensor, activation: str) -> Tensor:
    """The gate's function: ``silu``, ``gelu_tanh`` or ``gelu``."""
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def rounded(x: Tensor, weight: Weight) -> Tensor:
    """What enters the product with ``weight``: float32 x rounded once to its type; float64 x as it is (the judge)."""
    return x if x.dtype == torch.float64 else x.to(torch_dtype(weight.dtype)).to(x.dtype)


def product(x: Tensor, weight: Weight) -> Tensor:
    """Product of x [T, K] and the transposed weight as [T, N] in x's type; the weight is converted slice by slice."""
    y = x.new_empty(len(x), weight.n)
    count = max(1, SLICE // weight.k)
    if isinstance(weight, ReferenceWeight) and weight.data.dtype == x.dtype:
        count = weight.n
    for start in range(0, weight.n, count):
        stop = min(start + count, weight.n)
        if isinstance(weight, ReferenceWeight):
            rows = weight.data[start:stop]
        else:
            rows = weight.rows(torch.arange(start, stop))
        y[:, start:stop] = x @ rows.to(x.dtype).T
    return y


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``rotary`` channels of x [T, heads, D] by cos and sin [T, rotary/2], i with i + rotary/2."""
    half = cos.shape[-1]
    low, high, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def angles(name: str, cos: Tensor, sin: Tensor, positions: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, rotary/2] of ``positions`` [T]. KernelError, with the operation's name, beyond the tables."""
    if len(positions) and int(positions.max()) >= len(cos):
        raise KernelError(
            f"{name}: position {int(positions.max())} lies beyond the rotation table of {len(cos)} positions"
        )
    return cos[positions.long()].to(compute), sin[positions.long()].to(compute)
