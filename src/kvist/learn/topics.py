"""The topics of ``kvist learn``, in the order of the book, and where their scripts are."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from kvist.base.errors import UsageError

SHIPPED = Path(__file__).parent / "examples"  # in an installed package
SOURCE = Path(__file__).resolve().parents[3] / "examples"  # in a source tree


@dataclass(frozen=True, slots=True)
class Topic:
    """One subject. ``script`` runs anywhere, ``on_model`` on a real model; ``parameter`` is the option it takes."""

    name: str
    script: str | None
    on_model: str | None = None
    parameter: str | None = None


TOPICS = (
    Topic("work", "work", "work_on_model"),
    Topic("growing", "growing"),
    Topic("six-tokens", "six_tokens"),
    Topic("memory", "memory"),
    Topic("latent", "latent"),
    Topic("equal", "equal"),
    Topic("two-layers", "two_layers", parameter="head_dim"),
    Topic("one-kv-head", "one_kv_head"),
    Topic("compress", "compress"),
    Topic("rope", "rope"),
    Topic("ring", "ring"),
    Topic("deepseek", "deepseek"),
    Topic("plain", "plain"),
    Topic("roofline", "roofline", "roofline_on_model", "device"),
    Topic("cost", None, "cost_on_model"),
)


@dataclass(frozen=True, slots=True)
class Script:
    """A script as it lies on disk, with what its docstring says."""

    name: str
    path: Path
    title: str
    explanation: str

    @property
    def source(self) -> str:
        """The text of the script."""
        return self.path.read_text(encoding="utf-8")


def find_topic(name: str) -> Topic:
    """The topic called ``name``; UsageError lists the ones there are."""
    for topic in TOPICS:
        if topic.name == name.replace("_", "-"):
            return topic
    raise UsageError(f"no topic {name!r}: there are {', '.join(topic.name for topic in TOPICS)}")


def folder() -> Path:
    """Where the scripts are: in the installed package, or beside ``src`` in a source tree. UsageError without them."""
    for place in (SHIPPED, SOURCE):
        if (place / f"{TOPICS[0].script}.py").is_file():
            return place
    raise UsageError(f"the example scripts are neither in {SHIPPED} nor in {SOURCE}: reinstall kvist")


def read_script(name: str) -> Script:
    """The script called ``name``: its docstring is a title, an empty line and an explanation."""
    path = folder() / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    title, _, explanation = docstring.partition("\n\n")
    return Script(name, path, title.rstrip("."), " ".join(explanation.split()))


def script_of(topic: Topic, model: str | None) -> Script:
    """The script that answers for ``topic``; UsageError when it does not run as asked."""
    name = topic.script if model is None else topic.on_model
    if name is not None:
        return read_script(name)
    if model is None:
        raise UsageError(f"{topic.name} measures a real model: add --model smollm2, or another model")
    able = ", ".join(other.name for other in TOPICS if other.on_model)
    raise UsageError(f"{topic.name} needs no model: leave --model out (it is for {able})")
