"""Tensors of a checkpoint by canonical name, read in slices: a GGUF file or a folder of safetensors.

Both give rows [n, K]; what is quantised is unpacked slice by slice, so that the whole tensor never exists twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvist.base.errors import FormatError, Truncated, WeightsError
from kvist.kernels.native import NativeWeight
from kvist.kernels.ops import Weight
from kvist.kernels.packed import PackedWeight, packed_bytes, packed_refusal
from kvist.model.float8 import SUFFIX, TYPE, factors_shape, unpacked
from kvist.spec.from_gguf import GgufModel
from kvist.spec.gguf_file import LFS_POINTER
from kvist.spec.gguf_types import IDS
from kvist.spec.model import Attention, ModelSpec
from kvist.spec.names import ExpectedTensor, expected_tensors, half_split_rows, match_names, row_order

SLICE_BYTES = 1 << 24  # bytes of a tensor that are read and unpacked at once
_NATIVE_GGUF = frozenset(
    IDS[name] for name in ("f32", "f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
)


class Checkpoint(Protocol):
    """Tensors by canonical name (see ``spec.names``), names and shapes already checked against the spec."""

    expected: dict[str, ExpectedTensor]  # what the spec asks of files of this form

    def vector(self, name: str) -> Tensor | None:
        """A one-dimensional tensor as float32; None when the checkpoint has none of this name."""
        ...

    def packing(self, name: str) -> str | None:
        """The GGUF type in which matrix ``name`` can stay packed; None when it has to be unpacked."""
        ...

    def fill(self, name: str, weight: Weight, first: int) -> Iterator[int]:
        """Write tensor ``name`` [n, K] as rows first..first+n of ``weight``; yields the bytes read of each slice."""
        ...


class GgufCheckpoint:
    """The tensors of a GGUF file. Rows of q and k that llama.cpp interleaves for its rotation are put back."""

    def __init__(self, model: GgufModel) -> None:
        """Check names and shapes. WeightsError lists what is missing, extra or of another shape."""
        self.model, self.file = model, model.file
        self.expected = expected_tensors(model.spec, "gguf")
        tensors = model.file.tensors
        shapes = {name: info.shape for name, info in tensors.items()}
        match = match_names(model.spec, tensors, "gguf", shapes)
        match.require(str(model.file.path))
        self.names = match.found

    def vector(self, name: str) -> Tensor | None:
        """A norm or bias as float32 [width]; permuted like its matrix."""
        if name not in self.names:
            return None
        info = self.file.tensors[self.names[name]]
        values = _unpack(self.file.read_rows(self.names[name]), IDS[info.kind.name], info.shape[-1])
        return values.flatten()[self._order(name, info.shape[0])]

    def packing(self, name: str) -> str | None:
        """The file's own type, where kernels take it as it is."""
        info = self.file.tensors[self.names[name]]
        return None if packed_refusal(info.kind.name, info.shape[-1]) else info.kind.name

    def fill(self, name: str, weight: Weight, first: int) -> Iterator[int]:
        """Write the matrix: as it is into a packed weight, else unpacked row by row into the weight's own form."""
        file_name = self.names[name]
        info = self.file.tensors[file_name]
        rows, kind = info.shape[0], IDS[info.kind.name]
        # order[i] is the file's row of our row i; the map says where each of the file's rows goes.
        place = torch.empty(rows, dtype=torch.int64)
        place[self._order(name, rows)] = torch.arange(rows) + first
        step = max(1, SLICE_BYTES // info.row_nbytes)
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            raw = self.file.read_rows(file_name, start, stop)
            if isinstance(weight, PackedWeight) or (isinstance(weight, NativeWeight) and kind in _NATIVE_GGUF):
                weight.fill_gguf(_address(raw), kind, stop - start, place[start:stop].contiguous())
            else:
                values = _unpack(raw, kind, weight.k)
                _scatter(weight, values, place[start:stop])
            yield len(raw)

    def _order(self, name: str, rows: int) -> Tensor:
        role = name.removesuffix(".bias").rsplit(".", 1)[-1]
        if not self.model.permuted_qk or role not in ("q", "k"):
            return torch.arange(rows)
        attention = self.model.spec.layers[int(name.split(".")[1])].attention
        assert isinstance(attention, Attention)
        heads = attention.num_heads if role == "q" else attention.num_kv_heads
        return torch.tensor(half_split_rows(heads, attention.head_dim))


class SafetensorsCheckpoint:
    """The tensors of a folder of safetensors files, sharded or not.

    A file is mapped for one slice at a time: pages that were read count as this process's memory until it is unmapped.
    """

    def __init__(self, spec: ModelSpec, shards: tuple[Path, ...]) -> None:
        """Read every header and check names and shapes. WeightsError, or FormatError for a file that cannot be read."""
        self.expected = expected_tensors(spec)
        self.block = spec.fp8_block
        self.files: dict[str, Path] = {}
        self.float8: set[str] = set()  # file names of matrices that have factors
        shapes: dict[str, tuple[int, ...]] = {}
        kinds = {"F32", "BF16", "F16"} | ({TYPE} if self.block else set())
        for shard in shards:
            handle = _mapped(shard)
            for name in handle.keys():  # noqa: SIM118  (not a mapping)
                part = handle.get_slice(name)
                if part.get_dtype() not in kinds:
                    raise FormatError(
                        f"{shard}: tensor {name} has type {part.get_dtype()}: "
                        "float32, bfloat16 and float16 can be loaded, and float8 in blocks with a factor each; "
                        "save the model in one of these"
                    )
                if part.get_dtype() == TYPE:
                    self.float8.add(name)
                self.files[name] = shard
                shapes[name] = tuple(part.get_shape())
        where = str(shards[0].parent)
        self._take_factors(shapes, where)
        match = match_names(spec, shapes, "hf", shapes)
        match.require(where)
        self.names = match.found

    def vector(self, name: str) -> Tensor | None:
        """A norm or bias as float32 [width]."""
        if name not in self.names:
            return None
        tensor: Tensor = _mapped(self.files[self.names[name]]).get_tensor(self.names[name])
        order = row_order(self.expected[name])
        values = tensor.to(torch.float32, copy=True)
        return values if order is None else values[order]

    def packing(self, name: str) -> str | None:
        """None: safetensors are not packed."""
        return None

    def fill(self, name: str, weight: Weight, first: int) -> Iterator[int]:
        """Write the matrix slice by slice."""
        tensor, file_name = self.expected[name], self.names[name]
        shard, rows = self.files[file_name], tensor.shape[0]
        step = max(1, SLICE_BYTES // (weight.k * 2))
        factors = self._factors(file_name) if file_name in self.float8 else None
        listed, place = row_order(tensor), None
        if listed is not None:  # the inverse: where each of the file's rows goes
            order = torch.tensor(listed)
            place = torch.empty_like(order)
            place[order] = torch.arange(rows) + first
        for start in range(0, rows, step):
            stop = min(rows, start + step)
            part = _mapped(shard).get_slice(file_name)
            values = part[:, start:stop].T.contiguous() if tensor.transposed else part[start:stop]
            nbytes = values.numel() * values.element_size()
            if factors is not None and self.block is not None:
                values = unpacked(values, factors, start, self.block)
            if place is None:
                weight.fill(first + start, values)
            else:
                _scatter(weight, values, place[start:stop])
            del values, part  # and with them the mapping
            yield nbytes

    def _factors(self, file_name: str) -> Tensor:
        factors: Tensor = _mapped(self.files[file_name + SUFFIX]).get_tensor(file_name + SUFFIX)
        return factors

    def _take_factors(self, shapes: dict[str, tuple[int, ...]], where: str) -> None:
        """Take the factors of float8 matrices out of ``shapes``. WeightsError for one that is missing or misshaped."""
        for name in sorted(self.float8):
            assert self.block is not None
            wanted, found = factors_shape(shapes[name], self.block), shapes.pop(name + SUFFIX, None)
            if found != wanted:
                state = "missing" if found is None else f"{list(found)}"
                raise WeightsError(
                    f"{where}: {name} is float8 {list(shapes[name])} in blocks of {list(self.block)}, so "
                    f"{name}{SUFFIX} has to be {list(wanted)}; it is {state}"
                )


def _mapped(shard: Path) -> Any:
    """The file, mapped for as long as the result or a tensor of it is held. Truncated when it is not whole."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(shard), framework="pt")
    except (SafetensorError, OSError) as error:
        with shard.open("rb") as file:
            if file.read(len(LFS_POINTER)) == LFS_POINTER:
                pointer = f"{shard} is a pointer of Git LFS, not the file itself: `git lfs pull` fetches that"
                raise FormatError(pointer) from None
        raise Truncated(f"{shard}: not a complete safetensors file ({error}): download it again") from error


def loaded_bytes(spec: ModelSpec, element_bytes: int, packed: Checkpoint | None = None) -> int:
    """Bytes that the tensors of ``spec`` take once loaded, an embedding that is also the head counted once.

    ``packed``: the checkpoint whose quantised matrices stay packed; the others take ``element_bytes`` an element.
    """
    total = 0
    for name, tensor in expected_tensors(spec).items():
        if not tensor.optional:
            size = 1
            for extent in tensor.shape:
                size *= extent
            kind = packed.packing(name) if packed is not None and len(tensor.shape) == 2 else None
            if kind is not None:
                total += packed_bytes(kind, *tensor.shape)
            else:
                total += size * (element_bytes if len(tensor.shape) > 1 and not tensor.wide else 4)
    return total


def _unpack(raw: bytes, kind: int, width: int) -> Tensor:
    """GGUF blocks as float32 [rows, width], by the ``gguf`` package: what the native unpacking is held against."""
    if kind == IDS["f32"]:  # norms and biases of nearly every file: the package is not worth its import for them
        return torch.from_numpy(np.frombuffer(raw, dtype=np.float32).reshape(-1, width).copy())
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    quantised = GGMLQuantizationType(kind)
    block, size = GGML_QUANT_SIZES[quantised]
    data = np.frombuffer(raw, dtype=np.uint8).reshape(-1, width // block * size)
    try:
        return torch.from_numpy(np.array(dequantize(data, quantised), dtype=np.float32))
    except NotImplementedError as error:
        raise WeightsError(
            f"tensors of type {quantised.name} cannot be unpacked: requantise the file (Q4_K_M, Q8_0, ...)"
        ) from error


def _scatter(weight: Weight, values: Tensor, place: Tensor) -> None:
    """Rows to their places, consecutive ones together."""
    breaks = (torch.nonzero(place[1:] - place[:-1] != 1).flatten() + 1).tolist()
    for start, stop in zip([0, *breaks], [*breaks, len(place)], strict=True):
        weight.fill(int(place[start]), values[start:stop])


def _address(raw: bytes) -> int:
    """Where the bytes stand; they must outlive the use."""
    return ctypes.cast(ctypes.c_char_p(raw), ctypes.c_void_p).value or 0
