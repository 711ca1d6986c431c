"""Running a script: what it printed, what it found, and whether its checks hold.

A script is an ordinary program. It leaves a name ``result`` (plain values, for JSON and pictures) and a name ``checks``
(sentence to truth), and ends with ``assert all(checks.values()), checks``.
"""

from __future__ import annotations

import io
import runpy
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from kvist.base.errors import KvistError
from kvist.learn.topics import Script


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one script. ``checks`` maps each sentence to whether it held; ``result`` is None if one did not."""

    topic: str
    script: Script
    output: str
    checks: dict[str, bool] = field(default_factory=dict)
    result: Any = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether there was a check and all of them held."""
        return bool(self.checks) and all(self.checks.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "topic": self.topic,
            "script": self.script.path.name,
            "title": self.script.title,
            "explanation": self.script.explanation,
            "output": self.output.splitlines(),
            "result": self.result,
            "checks": self.checks,
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
        }


def run_script(topic: str, script: Script, arguments: Sequence[str] = ()) -> Finding:
    """Run ``script`` with ``arguments`` as its command line. What it raises, but for its checks, passes through."""
    printed = io.StringIO()
    before, begin = sys.argv, time.perf_counter()
    sys.argv = [str(script.path), *arguments]
    try:
        with redirect_stdout(printed):
            names = runpy.run_path(str(script.path))
    except AssertionError as failure:
        checks = failure.args[0] if failure.args else None
        if not isinstance(checks, dict):
            raise
        names = {"checks": checks, "result": None}
    finally:
        sys.argv = before
    if not names.get("checks"):
        raise KvistError(f"{script.path.name} checked nothing: it must leave a dict named checks")
    held = {str(sentence): bool(value) for sentence, value in names["checks"].items()}
    return Finding(topic, script, printed.getvalue(), held, names.get("result"), time.perf_counter() - begin)
