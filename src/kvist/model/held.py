"""How the matrices of a checkpoint are held: as GGUF packed them, or unpacked to one element type. Nothing is read."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.base.dtypes import BFLOAT16, FLOAT32, DType, parse_dtype
from kvist.base.errors import UsageError
from kvist.kernels.native import NativeBackend
from kvist.kernels.ops import Backend
from kvist.kernels.packed import PACKED_TYPES
from kvist.model.checkpoint import Checkpoint, loaded_bytes
from kvist.model.weights import refuse_beyond
from kvist.spec.model import ModelSpec
from kvist.spec.names import expected_tensors

PACKED = "packed"


@dataclass(frozen=True, slots=True)
class Held:
    """``dtype`` is what a matrix becomes that does not stay packed; ``nbytes`` what all of them will take."""

    packed: bool
    dtype: DType
    nbytes: int
    unpacked_nbytes: int  # the same as bfloat16
    packed_nbytes: int | None  # the same packed; None where nothing can be

    @property
    def name(self) -> str:
        """As the option ``--weights`` says it."""
        return PACKED if self.packed else self.dtype.name

    def require_memory(self, model: str) -> None:
        """Refuse, before anything is read, weights that do not fit: OutOfMemory with the sizes, packed and not."""
        remedy = None
        if not self.packed and self.packed_nbytes is not None:
            remedy = f"--weights packed ({self.packed_nbytes / 2**30:.2f} GiB)"
        elif not self.packed and self.dtype.bytes > 2:
            remedy = f"--weights bfloat16 ({self.unpacked_nbytes / 2**30:.2f} GiB)"
        form = f"{PACKED} ({self.unpacked_nbytes / 2**30:.2f} GiB as bfloat16)" if self.packed else self.dtype.name
        refuse_beyond(self.nbytes, model, form, remedy)


def can_pack(spec: ModelSpec, checkpoint: Checkpoint) -> bool:
    """Whether any matrix of the checkpoint has a type that stays packed."""
    return any(
        checkpoint.packing(name) is not None
        for name, tensor in expected_tensors(spec).items()
        if not tensor.optional and len(tensor.shape) == 2
    )


def held_as(
    spec: ModelSpec, checkpoint: Checkpoint, backend: Backend, weights: str = "auto", dtype: str = "auto"
) -> Held:
    """What ``weights`` (auto, packed, bfloat16, float32) and ``dtype`` (auto, bfloat16, float32) come to.

    UsageError for other words, for two that contradict each other, and for packed where nothing can be.
    """
    native = isinstance(backend, NativeBackend)
    possible = native and can_pack(spec, checkpoint)
    element = None if dtype == "auto" else parse_dtype(dtype, allowed=(FLOAT32, BFLOAT16))
    if weights not in ("auto", PACKED):
        try:
            wanted = parse_dtype(weights, allowed=(FLOAT32, BFLOAT16))
        except UsageError as error:
            raise UsageError(f"{error}, packed or auto") from None
        if element not in (None, wanted):
            raise UsageError(f"weights {weights} and dtype {dtype} contradict each other: give one of them")
        element = wanted
    elif weights == PACKED and not possible:
        reason = (
            f"no matrix of this model has a type that can stay so ({', '.join(PACKED_TYPES)})"
            if native
            else "only the native kernels multiply with packed weights"
        )
        raise UsageError(f"weights cannot be packed: {reason}; use auto, bfloat16 or float32")
    packed = weights == PACKED or (weights == "auto" and element is None and possible)
    if element is None:
        plain = not packed and (spec.dtype == FLOAT32.name or not native)
        element = FLOAT32 if plain else BFLOAT16
    smallest = loaded_bytes(spec, BFLOAT16.bytes, checkpoint) if possible else None
    nbytes = loaded_bytes(spec, element.bytes, checkpoint if packed else None)
    return Held(packed, element, nbytes, loaded_bytes(spec, BFLOAT16.bytes), smallest)
