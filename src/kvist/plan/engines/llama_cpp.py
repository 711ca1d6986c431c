"""llama.cpp's caches: padded cells for the whole context, fewer for windows, float32 states per slot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvist.base.errors import UsageError
from kvist.plan.cost import LayerKind, Widths, kinds_of
from kvist.plan.formats import FORMATS
from kvist.plan.sizes import show_count
from kvist.spec.kept import CacheLayer, CacheSpec, KeyValueRows, LatentRows, Part


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """The flags that change sizes.

    ``unified``: all slots share one set of cells. ``rollback_states``: copies of the recurrent state beside the current
    one. ``latent``: how MLA is stored: ``latent``, ``transposed`` (a second copy of the latent for the values) or
    ``expanded`` (keys and values of every head, old GGUF files).
    """

    ubatch: int = 512
    flash_attention: bool = True
    swa_full: bool = False
    unified: bool = True
    rollback_states: int = 0
    latent: str = "latent"

    @property
    def padding(self) -> int:
        """Cells come in multiples of this."""
        return 256 if self.flash_attention else 32


@dataclass(frozen=True, slots=True)
class LlamaCppEngine:
    """Sums over one device that holds all layers."""

    kinds: tuple[LayerKind, ...]
    settings: LlamaCppSettings
    name: str = "llama.cpp"

    def cells(self, n_ctx: int) -> int:
        """Cells of layers that see everything, for ``n_ctx`` tokens in all slots (or in one slot when not unified)."""
        return -(-n_ctx // 256) * 256

    def window_cells(self, n_ctx: int, window: int, slots: int) -> int:
        """Cells of windowed layers: a window per slot and one micro batch, never more than the full cells."""
        total = self.cells(n_ctx)
        if self.settings.swa_full:
            return total
        pad = self.settings.padding
        wanted = window * (slots if self.settings.unified else 1) + self.settings.ubatch
        return min(total, -(-wanted // pad) * pad)

    def cache_bytes(self, n_ctx: int, slots: int) -> int:
        """Bytes at ``--ctx-size n_ctx --parallel slots``; not unified, every slot has ``n_ctx`` cells of its own."""
        streams = 1 if self.settings.unified else slots
        total = 0
        for kind in self.kinds:
            for p in kind.pieces:
                bound = p.bound
                cells = self.cells(n_ctx) if not bound else self.window_cells(n_ctx, bound, slots)
                rows = 0 if not p.per_token else -(-cells // p.stride) * streams
                fixed = p.fixed * slots * (1 + self.settings.rollback_states)
                total += kind.count * (p.per_token * rows + fixed)
        return total

    def allocated(self, ctx: int, sequences: int) -> int:
        """Bytes for ``sequences`` slots of ``ctx`` tokens."""
        return self.cache_bytes(ctx * sequences if self.settings.unified else ctx, sequences) if ctx > 0 else 0

    def explain(self, ctx: int, sequences: int) -> tuple[str, ...]:
        """Cells and bytes of each kind of layer."""
        n_ctx = ctx * sequences if self.settings.unified else ctx
        lines = []
        for kind in self.kinds:
            for p in kind.pieces:
                if p.per_token:
                    cells = self.cells(n_ctx) if not p.bound else self.window_cells(n_ctx, p.bound, sequences)
                    lines.append(f"{kind.count} {kind.kind} layers x {show_count(cells)} cells x {p.per_token} B")
                if p.fixed:
                    copies = sequences * (1 + self.settings.rollback_states)
                    lines.append(f"{kind.count} {kind.kind} layers x {copies} copies x {show_count(p.fixed)} B")
        return tuple(lines)


def llama_cpp_engine(
    spec: CacheSpec, widths: Widths, settings: LlamaCppSettings, source_tokens: int | None = None
) -> LlamaCppEngine:
    """The caches that llama.cpp would make for ``spec``: architectures without a window there are charged in full."""
    # Both parts of a recurrent state are float32 there, whatever the checkpoint's type.
    wide = replace(widths, state=FORMATS["float32"], conv=FORMATS["float32"])
    layers = [replace(layer, parts=tuple(_stored(part, settings) for part in layer.parts)) for layer in spec.layers]
    return LlamaCppEngine(kinds_of(_without_plain_windows(layers), wide, 1, source_tokens), settings)


def _stored(part: Part, settings: LlamaCppSettings) -> Part:
    if not isinstance(part, LatentRows) or settings.latent == "latent":
        return part
    if settings.latent == "transposed":
        return KeyValueRows(1, part.elements, part.kv_lora_rank)
    if part.qk_nope_head_dim is None or part.v_head_dim is None:
        raise UsageError("the expanded form needs qk_nope_head_dim and v_head_dim, which the config does not give")
    return KeyValueRows(part.num_heads, part.qk_nope_head_dim + part.qk_rope_head_dim, part.v_head_dim)


def _without_plain_windows(layers: list[CacheLayer]) -> list[CacheLayer]:
    """A model whose layers are all windowed has no window in llama.cpp: it is only known for mixed patterns."""
    kept = [layer for layer in layers if layer.parts]
    if any(layer.kind != "swa" for layer in kept):
        return layers
    return [
        replace(layer, parts=tuple(replace(p, window=None) if isinstance(p, KeyValueRows) else p for p in layer.parts))
        for layer in layers
    ]
