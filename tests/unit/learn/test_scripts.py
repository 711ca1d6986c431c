"""The scripts as a reader finds them: short, on the public face alone, explained, and with checks that can fail."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import kvist
from kvist.base.errors import KvistError, UsageError
from kvist.cli.main import run
from kvist.learn import run as running
from kvist.learn import topics
from kvist.learn.pictures import PICTURES
from kvist.learn.run import run_script
from kvist.learn.topics import TOPICS, find_topic, read_script, script_of

NAMES = [name for topic in TOPICS for name in (topic.script, topic.on_model) if name is not None]
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
PUBLIC = {"kvist", "kvist.learn"}
ON_MODEL = [topic for topic in TOPICS if topic.on_model]


def test_every_script_belongs_to_a_topic() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(NAMES)
    assert len({topic.name for topic in TOPICS}) == len(TOPICS) == 15


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_short_public_and_explained(name: str) -> None:
    source = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 40
    tree = ast.parse(source)
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
            if node.module == "kvist.learn":
                assert {alias.name for alias in node.names} <= set(kvist.learn.__all__)
        elif isinstance(node, ast.Attribute):
            assert not node.attr.startswith("_"), node.attr
            if isinstance(node.value, ast.Name) and node.value.id == "kvist":
                assert node.attr in kvist.__all__
    ours = {module for module in imported if module.split(".")[0] == "kvist"}
    assert ours <= PUBLIC
    assert imported - ours <= {"torch", "sys", "time"}
    script = read_script(name)
    assert script.title and not script.title.endswith(".")
    assert 2 <= len(re.findall(r"[.!?](?= [A-Z]|$)", script.explanation)) <= 3, script.explanation
    assert source.rstrip().endswith("assert all(checks.values()), checks")


def test_a_script_runs_by_itself() -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "equal.py"], capture_output=True, text=True, check=True)
    assert "+0.0429 -0.2115 +0.1646" in done.stdout


def test_the_installed_package_looks_beside_itself_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert topics.folder() == EXAMPLES
    (tmp_path / "work.py").write_text("")
    monkeypatch.setattr(topics, "SHIPPED", tmp_path)
    assert topics.folder() == tmp_path
    monkeypatch.setattr(topics, "SHIPPED", tmp_path / "none")
    monkeypatch.setattr(topics, "SOURCE", tmp_path / "neither")
    with pytest.raises(UsageError, match="reinstall kvist"):
        topics.folder()


def test_the_width_of_a_head_is_a_parameter() -> None:
    finding = run_script("two-layers", read_script("two_layers"), ["24"])
    assert finding.result["head_dim"] == 24
    assert [row[2] for row in finding.result["rows"]] == [n * 2 * 2 * 2 * 24 * 4 for n in (1, 10, 100, 1000)]


@pytest.mark.parametrize("topic", ON_MODEL, ids=lambda topic: topic.name)
def test_on_a_small_model(topic: Any, small_model: Path) -> None:
    finding = run_script(topic.name, script_of(topic, "any"), [str(small_model)])
    assert finding.passed
    if topic.name == "work":
        assert finding.result["without"]["projections"][-1] == 107 * 108 // 2 - 7 * 8 // 2
    if topic.name == "roofline":
        assert [depth for depth, limit, speed in finding.result["points"] if limit > 0 and speed > 0][-1] == 4096
    if topic.name == "cost":
        assert all(ms > 0 for way in ("cached", "recomputed") for row in finding.result[way] for ms in row[1:])


@pytest.mark.slow
def test_real_projections_are_counted_on_smollm2() -> None:
    assert run_script("work", read_script("work_on_model"), ["smollm2"]).passed


# Faults, each planted where a check should see it: (script, what is broken, the failing check's words).
def worse_attention(patch: pytest.MonkeyPatch) -> None:
    right = kvist.LayerCache.attend
    patch.setattr(
        kvist.LayerCache,
        "attend",
        lambda self, q, scale=None: right(self, q, scale) * (1 + 1e-6 * float(torch.rand(1))),
    )


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    right = kvist.LayerCache.attend
    patch.setattr(kvist.LayerCache, "attend", lambda self, q, scale=None: right(self, q, 0.3))


def forgetful_latent(patch: pytest.MonkeyPatch) -> None:
    right = kvist.latent.attend_absorbed
    patch.setattr(kvist.latent, "attend_absorbed", lambda *a: right(*a) + torch.rand(1) * 1e-6)


def no_rotation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvist.learn, "rotate", lambda x, positions, theta=1.0: x)


def growing_ring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kvist.LayerCache, "nbytes", property(lambda self: self.seen))


FAULTS = [
    ("equal", worse_attention, "the kernels give the same bits"),
    ("equal", wrong_scale, "agree with the book's loop"),
    ("plain", wrong_scale, "both agree"),
    ("six_tokens", worse_attention, "the same bits with the cache and without"),
    ("one_kv_head", worse_attention, "eight kv heads give the same bits"),
    ("ring", worse_attention, "masked recomputation gives the same bits"),
    ("ring", growing_ring, "the memory never grew"),
    ("memory", growing_ring, "take the planned bytes"),
    ("compress", forgetful_latent, "cached MLA has the bits of recomputed MLA"),
    ("rope", no_rotation, "the two orders agree at distance 0 and nowhere else"),
    ("rope", forgetful_latent, None),
]


@pytest.mark.parametrize(("name", "plant", "words"), FAULTS)
def test_a_planted_fault_fails_the_check(
    name: str, plant: Any, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    finding = run_script(name, read_script(name))
    if words is None:  # within the tolerance that this check allows
        assert finding.passed
        return
    assert not finding.passed
    assert finding.result is None
    assert any(words in sentence for sentence, held in finding.checks.items() if not held), finding.checks


def planted(folder: Path, body: str) -> Any:
    path = folder / "planted.py"
    path.write_text(f'"""A title.\n\nOne. Two.\n"""\n{body}\n')
    return topics.Script("planted", path, "A title", "One. Two.")


def test_a_script_without_a_check_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvistError, match="checked nothing"):
        run_script("planted", planted(tmp_path, "result = 1"))
    with pytest.raises(AssertionError, match="of its own"):
        run_script("planted", planted(tmp_path, "assert False, 'of its own'"))
    before = sys.argv
    with pytest.raises(ZeroDivisionError):
        run_script("planted", planted(tmp_path, "1 / 0"))
    assert sys.argv is before


def test_a_failed_check_is_told_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = "print('seen')\nchecks = {'right': True, 'wrong': 0}\nassert all(checks.values()), checks"
    script = planted(tmp_path, body)
    monkeypatch.setattr(topics, "script_of", lambda topic, model: script)
    assert run(["learn", "equal"]) == 1
    out = capsys.readouterr().out
    assert "  seen\n\nOne. Two.\n\npassed: right\nFAILED: wrong\n" in out
    assert running.run_script("x", script).to_dict()["passed"] is False


def test_unknown_topic() -> None:
    with pytest.raises(UsageError, match=r"no topic 'warp': there are work, .*cost"):
        find_topic("warp")
    assert find_topic("six_tokens") is find_topic("six-tokens")


# The page's blocks of Python are run by tests/test_docs.py; its commands are run here.
PAGE = (EXAMPLES.parent / "docs" / "learn.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = sorted({line for language, block in BLOCKS if not language for line in block.splitlines()})


def test_the_page_shows_every_topic_and_picture() -> None:
    assert {line.split()[2] for line in COMMANDS if len(line.split()) > 2} == {topic.name for topic in TOPICS} | {
        "--all"
    }
    shown = set(re.findall(r"\(pictures/(\w+)\.png\)", PAGE))
    assert shown == set(PICTURES) == {path.stem for path in (EXAMPLES.parent / "docs" / "pictures").glob("*.png")}


@pytest.mark.parametrize("line", [line for line in COMMANDS if line != "kvist learn --all"])  # that one is `everything`
def test_commands_of_the_page(
    line: str, small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *arguments = line.split()
    assert program == "kvist"
    assert run([str(small_model) if word == "smollm2" else word for word in arguments]) == 0
    assert capsys.readouterr().out
