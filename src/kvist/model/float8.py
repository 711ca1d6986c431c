"""Matrices stored as float8 with one factor for each block of rows and columns: DeepSeek-V3's form.

The files call the factors ``weight_scale_inv``, although weights are multiplied by them. Elsewhere such models also
round activations to float8 at each step; here the weights alone are what the file says, unpacked once when loading.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvist.base.errors import FormatError

TYPE = "F8_E4M3"  # as safetensors spells it
SUFFIX = "_scale_inv"


def factors_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    """Extents of the factors of a matrix of ``shape`` [n, K] in blocks of ``block`` (rows, columns)."""
    if len(shape) != 2:
        raise FormatError(f"a float8 tensor of shape {list(shape)}: only matrices have a factor for each block")
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def unpacked(values: Tensor, factors: Tensor, first: int, block: tuple[int, int]) -> Tensor:
    """Rows ``values`` float8 [n, K], the first of which is row ``first`` of its matrix, as float32."""
    rows = (torch.arange(len(values)) + first) // block[0]
    columns = torch.arange(values.shape[1]) // block[1]
    return values.to(torch.float32) * factors.to(torch.float32)[rows][:, columns]
