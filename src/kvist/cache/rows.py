"""What a token leaves behind in one layer. MHA, GQA and MQA are one kind of row with other numbers."""

from __future__ import annotations

from dataclasses import dataclass

from kvist.base.errors import LayoutMismatch, UsageError
from kvist.spec.model import Attention, LatentAttention


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key of ``head_dim`` and a value of ``v_head_dim`` elements for each of ``num_kv_heads`` heads."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        """Refuse rows that hold nothing (UsageError)."""
        _positive(self.num_kv_heads, "num_kv_heads")
        _positive(self.head_dim, "head_dim")
        _positive(self.v_head_dim, "v_head_dim")

    @property
    def parts(self) -> tuple[int, int, int]:
        """(heads, key width, value width): how the row lies in a block."""
        return self.num_kv_heads, self.head_dim, self.v_head_dim

    @property
    def elements_per_token(self) -> int:
        """Elements that one token stores in one layer."""
        return self.num_kv_heads * (self.head_dim + self.v_head_dim)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: c_KV of ``kv_lora_rank`` and rotated k_R of ``qk_rope_head_dim``, one for all heads.

    Stored as the one key ``[c_KV, k_R]``; the value is the first ``kv_lora_rank`` elements of it, not a second copy.
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        """Refuse rows that hold nothing (UsageError)."""
        _positive(self.kv_lora_rank, "kv_lora_rank")
        if self.qk_rope_head_dim < 0:
            raise UsageError(f"qk_rope_head_dim is {self.qk_rope_head_dim}: it must be 0 or more")

    @property
    def parts(self) -> tuple[int, int, int]:
        """(heads, key width, value width): how the row lies in a block."""
        return 1, self.elements_per_token, 0

    @property
    def elements_per_token(self) -> int:
        """Elements that one token stores in one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent layer: one place of ``bytes`` bytes per request, whatever its length."""

    bytes: int

    def __post_init__(self) -> None:
        """Refuse rows that hold nothing (UsageError)."""
        _positive(self.bytes, "bytes")

    @property
    def parts(self) -> tuple[int, int, int]:
        """A state has no heads and no token rows: LayoutMismatch."""
        raise LayoutMismatch(
            f"a recurrent state of {self.bytes} bytes has no rows per token: ask for its bytes instead"
        )

    @property
    def elements_per_token(self) -> int:
        """Elements that one more token adds: none."""
        return 0


Rows = KeyValue | Latent | State


def rows_of(attention: Attention | LatentAttention) -> Rows:
    """What a token leaves behind in a layer with this attention."""
    if isinstance(attention, LatentAttention):
        return Latent(attention.kv_lora_rank, attention.qk_rope_head_dim)
    return KeyValue(attention.num_kv_heads, attention.head_dim, attention.v_head_dim)


def _positive(value: int, name: str) -> None:
    if value <= 0:
        raise UsageError(f"{name} is {value}: it must be 1 or more")
