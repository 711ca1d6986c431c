"""A progress bar on stderr, for work that takes more than a second, on a terminal only."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_S = 1.0  # shorter work shows nothing
LOOK_S = 0.2


class Bar:
    """Shows how far something is, from the second on."""

    def __init__(self, label: str) -> None:
        """Nothing is shown yet."""
        self._label = label
        self._begin = time.monotonic()
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes or tokens."""
        if self._progress is None:
            if not sys.stderr.isatty() or time.monotonic() - self._begin < PATIENCE_S:
                return
            self._show()
        assert self._progress is not None and self._task is not None
        self._progress.update(self._task, completed=min(done, total), total=total)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(self._label, total=None)
        self._progress.start()

    def close(self) -> None:
        """Leave the line as it was."""
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def progress(label: str) -> Iterator[Bar]:
    """A bar that is gone when the work is done."""
    bar = Bar(label)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def watching(label: str, read: Callable[[], int], total: int) -> Iterator[None]:
    """A bar over work that does not report: ``read`` says how far it is, and is asked from a thread beside it."""
    if not sys.stderr.isatty():
        yield
        return
    done = Event()
    with progress(label) as bar:

        def look() -> None:
            while not done.wait(LOOK_S):
                bar(read(), total)

        watcher = Thread(target=look, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
