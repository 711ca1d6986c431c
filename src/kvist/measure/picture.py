"""Tokens per second against depth, as measured, under the line that reading memory draws."""

from __future__ import annotations

from pathlib import Path

from kvist.base.errors import UsageError
from kvist.measure.bench import Report
from kvist.plan.plot import check_ending

_LIMIT, _SPEED = "#777777", "#2b5c8a"


def check_picture(path: Path) -> None:
    """UsageError, before anything is measured, when no picture can be drawn or ``path`` cannot hold one."""
    check_ending(path)
    try:
        import matplotlib.figure  # noqa: F401  (only whether it is there)
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'kvist[plot]'") from error
    if not path.absolute().parent.is_dir():
        raise UsageError(f"cannot write {path}: there is no folder {path.absolute().parent}")


def draw(report: Report, path: Path) -> None:
    """Write the picture of ``report``'s decoding to ``path`` (png, svg or pdf)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    ax = figure.subplots()
    depths = [depth for depth, _ in report.decode]
    speeds = [found.median for _, found in report.decode]
    limits = [found.limit or 0.0 for _, found in report.decode]
    low = [found.median - found.lowest for _, found in report.decode]
    high = [found.highest - found.median for _, found in report.decode]
    ax.plot(depths, limits, color=_LIMIT, lw=2)
    ax.errorbar(depths, speeds, yerr=(low, high), color=_SPEED, lw=2, marker="o", capsize=3)
    for values, colour, text in (
        (limits, _LIMIT, f"limit: memory\nreads {report.read_gbps:.0f} GB/s"),
        (speeds, _SPEED, "measured"),
    ):
        if depths:
            ax.annotate(
                text, (depths[-1], values[-1]), xytext=(8, 0), textcoords="offset points", va="center", color=colour
            )
    ax.set_title(f"{report.model} on {report.kernels}, {report.threads} threads: {report.dtype} weights")
    ax.set_xlabel("depth, tokens in the cache")
    ax.set_ylabel("tokens/s, one request")
    ax.set_xlim(-0.02 * max(depths, default=1), 1.25 * max([*depths, 1]))
    ax.set_ylim(0, 1.1 * max([*speeds, *limits, 1]))
    ax.grid(True, alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
