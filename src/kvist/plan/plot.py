"""Cache bytes and the bandwidth roofline against context, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvist.base.errors import UsageError
from kvist.plan.cost import sequence_bytes
from kvist.plan.record import Plan
from kvist.plan.sizes import show_bytes

_FORMS = (".png", ".svg", ".pdf")
_ALLOCATED, _ROWS, _LIMIT, _SPEED = "#b3541e", "#2f5d62", "#7a7a7a", "#3a5a9b"


def check_ending(path: Path) -> None:
    """UsageError unless ``path`` ends as a kind of picture that can be written."""
    if path.suffix.lower() not in _FORMS:
        raise UsageError(f"{path}: a picture must end in one of {', '.join(_FORMS)}")


def draw(plan: Plan, path: Path) -> None:
    """Write the picture to ``path`` (png, svg or pdf). UsageError without matplotlib, or for another ending."""
    check_ending(path)
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'kvist[plot]'") from error
    panels = 2 if plan.roofline else 1
    figure = Figure(figsize=(8, 4.2 * panels), dpi=120, layout="constrained")
    axes = list(figure.subplots(panels, 1, squeeze=False)[:, 0])
    limit = max(plan.ctx_size, 256)
    contexts = sorted({limit, *(2**power for power in range(7, 41) if 2**power < limit)})
    _bytes(plan, contexts, axes[0])
    if plan.roofline:
        _speed(plan, axes[1])
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xlim(contexts[0], contexts[-1])
        powers = [ctx for ctx in contexts if ctx & (ctx - 1) == 0]
        ticks = powers[:: -(-len(powers) // 10)]
        ax.set_xticks(ticks, [_short(ctx) for ctx in ticks])
        ax.minorticks_off()
        ax.set_xlabel("tokens of each sequence")
        ax.grid(True, alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
        ax.legend(frameon=False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def _bytes(plan: Plan, contexts: list[int], ax: Any) -> None:
    count = plan.settings.max_num_seqs
    allocated = [plan.engine.allocated(ctx, count) for ctx in contexts]
    needed = [count * sequence_bytes(plan.layers, ctx) for ctx in contexts]
    ax.plot(contexts, allocated, color=_ALLOCATED, lw=2, label=f"{plan.settings.engine} allocates")
    ax.plot(contexts, needed, color=_ROWS, lw=2, ls="--", label="the rows alone")
    if plan.room.left is not None:
        left = plan.room.left[0]
        if 0 < left <= 8 * max(allocated):
            ax.axhline(left, color=_LIMIT, lw=1.2, ls=":", label=f"left for K and V: {show_bytes(left)}")
    if max(allocated) > 0:
        ax.set_yscale("log", base=2)
        ax.yaxis.set_major_formatter(lambda value, _: show_bytes(value).replace(".00", ""))
    ax.set_ylabel(f"cache of {count} sequence(s)")
    ax.set_title(f"{plan.model}: {plan.types.name} cache")


def _speed(plan: Plan, ax: Any) -> None:
    assert plan.device is not None and plan.device.bandwidth is not None
    rate = plan.device.bandwidth / 1e9
    label = f"reading weights and cache at {rate:,.0f} GB/s"
    ax.plot(
        [p.ctx for p in plan.roofline], [p.tokens_per_second for p in plan.roofline], color=_SPEED, lw=2, label=label
    )
    ax.set_ylim(bottom=0)
    ax.set_ylabel("tokens/s, all sequences")
    ax.set_title(f"bandwidth roofline on {plan.device.name} ({plan.device.status})")


def _short(ctx: int) -> str:
    return f"{ctx // 2**20}M" if ctx >= 2**20 else f"{ctx // 1024}k" if ctx >= 1024 else str(ctx)
