"""``kvist learn`` as a command: what it lists, prints, draws and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from kvist.cli.main import run
from kvist.learn.pictures import PICTURES, require_matplotlib
from kvist.learn.run import run_script
from kvist.learn.topics import TOPICS, read_script, script_of

PNG = b"\x89PNG"


@pytest.mark.parametrize("arguments", [["learn", "--help"], ["learn"], ["learn", "ring", "--source"]])
def test_help_list_and_source_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from kvist.cli.main import run; code = run(sys.argv[1:]);"
        "print(sorted({'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)), file=sys.stderr);"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert len(done.stdout.splitlines()) > 15


def test_the_list_names_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["learn"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[: len(TOPICS)]] == [topic.name for topic in TOPICS]
    assert max(len(line) for line in out) <= 120
    assert run(["learn", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["topics"]
    assert [entry["topic"] for entry in listed] == [topic.name for topic in TOPICS]
    assert [entry["topic"] for entry in listed if entry["takes_model"]] == ["work", "roofline", "cost"]
    assert [entry["topic"] for entry in listed if entry["needs_model"]] == ["cost"]


def test_all_runs_every_topic_that_needs_no_model(everything: Any) -> None:
    assert list(everything.findings) == [topic.name for topic in TOPICS if topic.script]
    for finding in everything.findings.values():
        assert finding.script.title in everything.text
        assert finding.output.strip()
        assert json.loads(json.dumps(finding.to_dict()))["passed"] is True
    assert everything.text.rstrip().endswith("kvist learn --all --model smollm2")


def test_json_holds_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["learn", "equal", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    (one,) = whole["topics"]
    assert whole["passed"] is one["passed"] is True
    assert one["script"] == "equal.py" and one["seconds"] > 0
    assert one["result"][3]["cached"] == one["result"][3]["full"]
    assert len(one["checks"]) == 3 and all(one["checks"].values())


def test_source_is_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["learn", "work", "--model", "any", "--source"]) == 0
    assert capsys.readouterr().out.rstrip() == read_script("work_on_model").source.rstrip()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["learn", "warp"], "no topic 'warp': there are work,"),
        (["learn", "ring", "--all"], "give one or the other"),
        (["learn", "--model", "smollm2"], "--model needs a topic, or --all"),
        (["learn", "--source"], "--source needs a topic"),
        (["learn", "cost"], "cost measures a real model: add --model smollm2"),
        (["learn", "ring", "--model", "smollm2"], "ring needs no model"),
        (["learn", "ring", "--head-dim", "32"], "--head-dim changes nothing here: two-layers takes it"),
        (["learn", "work", "--device", "h100"], "--device changes nothing here: roofline takes it"),
        (["learn", "roofline", "--device", "abacus"], "unknown device 'abacus'"),
        (["learn", "cost", "--model", "nowhere.gguf"], "nowhere.gguf"),
        (["learn", "equal", "--plot", "x"], "equal has no picture"),
        (["learn", "ring", "--source", "--json"], "--source prints a script and runs nothing"),
        (["learn", "two-layers", "--head-dim", "0"], "Invalid value for '--head-dim'"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(["learn", "memory", "--plot", str(tmp_path / "file")]) == 2
    captured = capsys.readouterr()
    assert "cannot write pictures into" in captured.err and captured.out == ""


def test_pictures_are_written(everything: Any) -> None:
    written = {path.stem for path in everything.pictures.iterdir()}
    assert written == {name for name in PICTURES if not name.endswith("_on_model")}
    assert all(path.read_bytes()[:4] == PNG for path in everything.pictures.iterdir())


def drawn_texts(figure: Any) -> list[Any]:
    """Every text that is drawn: titles, labels, annotations, and the labels of ticks within the axes' limits."""
    from matplotlib.text import Text

    off = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            off |= {id(tick.label1) for tick in ticks if not low <= tick.get_loc() <= high}
            off |= {id(tick.label2) for tick in ticks}
    return [t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip() and id(t) not in off]


def overlaps(figure: Any) -> list[str]:
    """Pairs of texts that cover each other, and texts that leave the picture."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    shown = [(text.get_text(), text.get_window_extent(renderer)) for text in drawn_texts(figure)]
    width, height = figure.canvas.get_width_height()
    found = [text for text, box in shown if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1]
    for (a, first), (b, second) in combinations(shown, 2):
        apart_x = min(first.x1, second.x1) - max(first.x0, second.x0)
        apart_y = min(first.y1, second.y1) - max(first.y0, second.y0)
        if apart_x > 1 and apart_y > 1:
            found.append(f"{a!r} over {b!r}")
    return found


def painted(name: str, result: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = require_matplotlib()(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    PICTURES[name](figure, result)
    return figure


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic.script in PICTURES], ids=lambda topic: topic.name)
def test_no_text_of_a_picture_overlaps(topic: Any, everything: Any) -> None:
    assert overlaps(painted(topic.script, everything.findings[topic.name].result)) == []


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic.on_model], ids=lambda topic: topic.name)
def test_pictures_of_a_model(topic: Any, small_model: Path) -> None:
    result = run_script(topic.name, script_of(topic, "any"), [str(small_model)]).result
    result["model"] = "small"
    figure = painted(topic.on_model, result)
    assert [ax.get_xlabel() for ax in figure.axes if not ax.get_xlabel()] == []
    assert overlaps(figure) == []


def test_a_planted_overlap_is_seen() -> None:
    figure = painted(
        "roofline",
        {name: [[128, 9.0], [256, 9.0]] for name in ("8 kv heads", "32 kv heads")}
        | {
            "device": "none",
            "bandwidth": 1e9,
        },
    )
    assert any("over" in text for text in overlaps(figure))
