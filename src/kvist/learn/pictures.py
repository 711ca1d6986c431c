"""Pictures of what the scripts found. Lines and bars are labelled where they are: no legend to match."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvist.base.errors import UsageError

BLUE, RUST, GREEN, GREY, VIOLET = "#2b5c8a", "#b3541e", "#3c7a4b", "#777777", "#6b4a86"
Result = Any  # what a script left, as JSON would hold it


def require_matplotlib() -> Any:
    """The class of figures; UsageError when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'kvist[plot]'") from error
    return Figure


def draw(name: str, result: Result, path: Path) -> None:
    """Write the picture of script ``name`` to ``path``. UsageError without matplotlib, or when it cannot be written."""
    figure = require_matplotlib()(figsize=(8, 4.5), dpi=120, layout="constrained")
    PICTURES[name](figure, result)
    try:
        figure.savefig(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error


def work(figure: Any, result: Result) -> None:
    """Projections against length, both ways, with the formulas as lines."""
    ax = _axes(figure, "tokens generated, n", "keys and values computed, in all", "The cache removes projections")
    lengths = [10 ** (i / 20) for i in range(20, 73)]
    lines = (
        (1, [n * (n + 1) / 2 for n in lengths], RUST, "without a cache\nn(n + 1)/2"),
        (2, lengths, BLUE, "with one\nn"),
    )
    for column, formula, colour, text in lines:
        ax.loglog(lengths, formula, color=colour, lw=1.5)
        ax.plot([row[0] for row in result], [row[column] for row in result], "o", color=colour)
        _label(ax, lengths[-1], formula[-1], text, colour)
    for n, without, with_, times in result:
        ax.annotate(
            f"{times:,.1f}x",
            (n, (without * with_) ** 0.5),
            ha="center",
            va="center",
            color=GREY,
            bbox={"fc": "white", "ec": "none", "pad": 1.5},
        )
        ax.plot([n, n], [with_, without], color=GREY, lw=0.8, ls=":", zorder=0)
    ax.set_xlim(8, lengths[-1] * 5)


def growing(figure: Any, result: Result) -> None:
    """Keys and values after each token, a column per token, the newest one framed."""
    grid = figure.subplots(2, len(result), sharey=True, gridspec_kw={"width_ratios": range(1, len(result) + 1)})
    for column, (word, parts) in enumerate(result):
        for row, (name, values) in enumerate(zip(("keys", "values"), parts, strict=True)):
            ax = grid[row][column]
            ax.imshow(values, cmap="PuOr", vmin=-0.35, vmax=0.35, aspect="equal")
            ax.add_patch(_frame(len(values[0]) - 1, len(values)))
            ax.set_xticks([])
            ax.set_yticks([])
            ax.spines[:].set_visible(False)
            if row == 0:
                ax.set_title(f"“{word}”", fontsize=11)
            if column == 0:
                ax.set_ylabel(f"{name}\n{len(values)} channels")
            if row == 1:
                ax.set_xlabel(f"{column + 1}")
    figure.suptitle("Each token adds one column, and nothing else is touched")
    figure.supxlabel("tokens in the cache (orange: below zero, violet: above; framed: the new column)", fontsize=10)


def memory(figure: Any, result: Result) -> None:
    """Bytes of each model's cache as bars on a logarithmic axis."""
    ax = _axes(
        figure, "cache of one sequence, GB of 2^30 bytes (logarithmic)", "", "What the cache of real models takes"
    )
    ax.grid(False, axis="y")
    names = [f"{name}\n{tokens:,} tokens, {dtype}" for name, dtype, _, tokens, _, _ in result]
    sizes = [size / 2**30 for *_, size, _ in result]
    colours = [BLUE, BLUE, RUST, BLUE, RUST, BLUE]
    ax.barh(names, sizes, color=colours, height=0.62)
    for row, (size, shown) in enumerate(zip(sizes, (entry[-1] for entry in result), strict=True)):
        ax.annotate(shown, (size, row), xytext=(5, 0), textcoords="offset points", va="center")
    ax.set_xscale("log")
    ax.set_xlim(0.02, 6000)
    ax.invert_yaxis()
    ax.tick_params(axis="y", length=0)


def latent(figure: Any, result: Result) -> None:
    """Floats per token and layer, as heads and as a latent, at both sizes."""
    panels = figure.subplots(1, 2)
    for ax, name, title in zip(
        panels, ("toy", "DeepSeek-V3"), ("toy: 8 heads of 8", "DeepSeek-V3: 128 heads of 128"), strict=True
    ):
        full, small, ratio = result[name]
        ax.bar(
            ["keys and values\nof all heads", "latent and\nrotated key"], [full, small], color=[RUST, BLUE], width=0.6
        )
        for at, floats in enumerate((full, small)):
            ax.annotate(
                f"{floats:,}", (at, floats), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom"
            )
        ax.set_title(f"{title}\n{ratio} less")
        ax.set_ylim(0, full * 1.1)
        ax.spines[["top", "right"]].set_visible(False)
        ax.yaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel("floats per token and layer")


def compress(figure: Any, result: Result) -> None:
    """What is lost of rows against the floats kept. Random directions lose alike of any rows."""
    ax = _axes(
        figure, "floats kept of 128 channels", "lost (norm of the difference / norm)", "What survives compression"
    )
    ranks = [4, 8, 16, 32, 64, 128]
    labels = (
        ("not from a latent, random", RUST, "-", "random directions, whatever the rows", 3, (8, 8), "left"),
        ("from a latent of 16, random", BLUE, (0, (4, 4)), "", 0, (0, 0), "left"),
        ("not from a latent, SVD", RUST, "-", "best directions, rows\nnot made from a latent", 3, (-12, -22), "right"),
        (
            "from a latent of 16, SVD",
            BLUE,
            "-",
            "best directions, rows\nmade from a latent of 16",
            1,
            (-2, -50),
            "right",
        ),
    )
    for name, colour, dashes, text, at, offset, align in labels:
        losses = result[name]
        ax.plot(ranks, losses, ls=dashes, marker="o", ms=4, color=colour)
        ax.annotate(
            text,
            (ranks[at], losses[at]),
            xytext=offset,
            textcoords="offset points",
            ha=align,
            va="center",
            color=colour if text[:6] != "random" else GREY,
        )
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [str(rank) for rank in ranks])
    ax.set_ylim(-0.06, 1.12)
    ax.set_xlim(2, 150)
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def rope(figure: Any, result: Result) -> None:
    """The commutator and the error of absorbed scores against distance."""
    ax = _axes(
        figure,
        "distance between query and key, tokens",
        "relative size (norm)",
        "Rotation does not pass through the latent",
    )
    distances = range(len(result))
    for column, colour, text in (
        (2, RUST, "error of scores\nabsorbed once"),
        (1, BLUE, "commutator\n|R W − W R| / |W|"),
        (3, GREEN, "error of scores absorbed\nanew at each distance"),
    ):
        ax.plot(distances, [row[column] for row in result], marker="o", ms=4, color=colour)
        _label(ax, distances[-1], result[-1][column] + {2: 0.05, 1: -0.08, 3: 0.0}[column], text, colour)
    ax.set_xticks(list(distances), [str(row[0]) for row in result])
    ax.set_xlim(-0.2, len(result) + 1.9)
    ax.set_ylim(bottom=-0.15)


def ring(figure: Any, result: Result) -> None:
    """Which positions are held as tokens come, and how far the output is from that of a cut prompt."""
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2]})
    lengths = [row[0] for row in result]
    above.fill_between(
        lengths, [row[1][0] - 0.5 for row in result], [row[1][-1] + 0.5 for row in result], color=BLUE, step="mid", lw=0
    )
    above.set_ylabel("position")
    above.annotate(
        f"held: the newest {len(result[-1][1])}\n{result[-1][2]:,} bytes at every length",
        (30, 26),
        xytext=(34, 12),
        color=BLUE,
        va="center",
        arrowprops={"arrowstyle": "-", "color": BLUE},
    )
    below.plot(lengths, [row[3] for row in result], color=RUST, marker="o", ms=3)
    below.set_ylabel("difference from\nthe cut prompt")
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    below.set_xlabel("tokens so far")
    for ax in (above, below):
        ax.grid(True, alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    above.set_title("A ring of 8 rows: bounded memory, and not the same as a shorter prompt")


def roofline(figure: Any, result: Result) -> None:
    """The most tokens per second against context, for both numbers of kv heads."""
    title = (
        f"The limit of reading: LLaMA-7B's shape, bfloat16, {result['device']} at {result['bandwidth'] / 1e9:,.0f} GB/s"
    )
    ax = _axes(figure, "context, tokens", "tokens/s at most, one sequence", title)
    for name, colour in (("8 kv heads", BLUE), ("32 kv heads", RUST)):
        points = result[name]
        ax.plot([ctx for ctx, _ in points], [speed for _, speed in points], color=colour, lw=2)
        _label(ax, points[-1][0], points[-1][1], name, colour)
    _contexts(ax, [ctx for ctx, _ in result["8 kv heads"]], right=2.6)
    ax.set_ylim(bottom=0)


def work_on_model(figure: Any, result: Result) -> None:
    """Projections counted over the formula, and the time of each step."""
    left, right = figure.subplots(1, 2)
    prompt = result["prompt"]
    lengths = [prompt + i for i in range(len(result["with"]["projections"]))]
    formulas = {
        "without": [n * (n + 1) / 2 - prompt * (prompt - 1) / 2 for n in lengths],
        "with": [float(n) for n in lengths],
    }
    ends: list[tuple[float, str, str]] = []
    for way, colour, text in (("without", RUST, "without\na cache"), ("with", BLUE, "with one")):
        left.plot(lengths, formulas[way], color=colour, lw=1.2)
        left.plot(lengths[::6], result[way]["projections"][::6], "o", ms=4, color=colour)
        milliseconds = [second * 1e3 for second in result[way]["seconds"]]
        right.plot(lengths, milliseconds, color=colour, lw=1.2)
        ends.append((sorted(milliseconds[-10:])[5], text, colour))
    left.annotate(
        "without a cache\nn(n + 1)/2",
        (lengths[66], formulas["without"][66]),
        xytext=(-10, 8),
        textcoords="offset points",
        ha="right",
        color=RUST,
    )
    left.annotate(
        "with one: n", (lengths[-1], lengths[-1]), xytext=(0, 8), textcoords="offset points", ha="right", color=BLUE
    )
    left.set_title("counted (dots) on the formula (lines)", fontsize=11)
    left.set_ylabel("tokens through the layers, in all")
    left.yaxis.set_major_formatter("{x:,.0f}")
    right.set_title("time of each step", fontsize=11)
    right.set_ylabel("milliseconds")
    right.set_ylim(bottom=0)
    _label_ends(right, lengths[-1], ends)
    right.set_xlim(right=lengths[-1] * 1.5)
    right.set_xticks(range(20, lengths[-1], 20))
    for ax in (left, right):
        ax.set_xlabel("tokens of text, n")
        ax.grid(True, alpha=0.25)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['model']}: projection work, measured")


def roofline_on_model(figure: Any, result: Result) -> None:
    """Measured speed under the limit of memory."""
    title = f"{result['model']} on {result['kernels']}: speed against depth"
    ax = _axes(figure, "depth, tokens in the cache", "tokens/s, one sequence", title)
    depths = [point[0] for point in result["points"]]
    limit, speed = [point[1] for point in result["points"]], [point[2] for point in result["points"]]
    ax.plot(depths, limit, color=GREY, lw=2)
    ax.plot(depths, speed, color=BLUE, lw=2, marker="o")
    _contexts(ax, depths, right=2.2)
    ax.set_ylim(0, max(limit + speed) * 1.08)
    bound = f"limit: memory\nreads {result['bandwidth'] / 1e9:.0f} GB/s"
    _label_ends(ax, depths[-1], [(limit[-1], bound, GREY), (speed[-1], "measured", BLUE)])


def cost_on_model(figure: Any, result: Result) -> None:
    """The parts of a step as stacked areas, cached and recomputed."""
    panels = figure.subplots(1, 2)
    colours = (BLUE, RUST, GREEN, GREY)
    order = [0, 2, 3, 1]  # attention, which grows, lies on top
    for ax, way, title in zip(
        panels, ("cached", "recomputed"), ("with the cache", "recomputing everything"), strict=True
    ):
        depths = [row[0] for row in result[way]]
        columns = [[row[1 + part] for row in result[way]] for part in order]
        ax.stackplot(depths, columns, colors=[colours[part] for part in order], alpha=0.85)
        bases = [sum(column[-1] for column in columns[:n]) for n in range(len(columns) + 1)]
        middles = [(low + high) / 2 for low, high in pairwise(bases)]
        ax.set_title(title, fontsize=11)
        ax.set_xlabel("tokens in the text")
        ax.set_xlim(depths[0], depths[-1] * 1.42)
        ax.set_xticks(depths[2:], [f"{depth:,}" for depth in depths[2:]])
        ax.set_ylim(bottom=0)
        texts = [result["parts"][part].replace(" and ", "\nand ") for part in order]
        _label_ends(ax, depths[-1], list(zip(middles, texts, (colours[part] for part in order), strict=True)))
        ax.spines[["top", "right"]].set_visible(False)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:g}")
    panels[0].set_ylabel("milliseconds for one token")
    figure.suptitle(f"{result['model']}: what one more token costs")


PICTURES: dict[str, Callable[[Any, Result], None]] = {
    function.__name__: function
    for function in (
        *(work, growing, memory, latent, compress, rope, ring, roofline),
        *(work_on_model, roofline_on_model, cost_on_model),
    )
}


def _axes(figure: Any, x: str, y: str, title: str) -> Any:
    ax = figure.subplots()
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.set_title(title)
    ax.grid(True, alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _label(ax: Any, x: float, y: float, text: str, colour: str) -> None:
    """Text to the right of a line's last point."""
    ax.annotate(text, (x, y), xytext=(8, 0), textcoords="offset points", ha="left", va="center", color=colour)


def _label_ends(ax: Any, x: float, ends: list[tuple[float, str, str]]) -> None:
    """Texts at (y, text, colour) right of ``x``, moved up where two would stand closer than their height."""
    gap, last = ax.get_ylim()[1] / 10, float("-inf")
    for y, text, colour in sorted(ends, key=lambda end: end[0]):
        last = max(y, last + gap)
        _label(ax, x, last, text, colour)


def _contexts(ax: Any, contexts: list[int], right: float) -> None:
    """A base-2 axis over ``contexts`` with room on the right for labels."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(contexts[0], contexts[-1] * right)
    ax.set_xticks(contexts, [f"{ctx // 1024}k" if ctx >= 1024 else str(ctx) for ctx in contexts])
    ax.minorticks_off()


def _frame(column: int, height: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((column - 0.5, -0.5), 1, height, fill=False, ec="black", lw=2, clip_on=False)
