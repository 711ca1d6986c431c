"""A conversation at the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

from kvist.base.errors import RequestError, UsageError
from kvist.cli.answer import consume

if TYPE_CHECKING:
    from kvist.compose import LLM, Completion
    from kvist.engine.request import Sampling

ASK = "> "


class Chat:
    """Asks for a line, prints the answer, and remembers both. ``completions`` are the answers so far."""

    def __init__(self, llm: LLM, sampling: Sampling, system: str | None = None) -> None:
        """An empty conversation, after ``system`` when there is one."""
        self.llm = llm
        self.sampling = sampling
        self.messages = [{"role": "system", "content": system}] if system else []
        self.completions: list[Completion] = []

    def run(self) -> None:
        """Until Ctrl-D. Ctrl-C stops an answer (what was said stays part of the conversation) or discards a line."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() its line editing and history
        name = self.llm.setup.name if self.llm.setup else "the model"
        print(f"{name}: Ctrl-C stops an answer, Ctrl-D ends", file=sys.stderr)
        while True:
            try:
                line = input(ASK)
            except KeyboardInterrupt:
                print()
                continue
            except EOFError:
                print()
                return
            except UnicodeDecodeError as error:
                print(f"kvist: that line is not UTF-8 ({error.reason}); nothing was sent", file=sys.stderr)
                continue
            if line.strip():
                self.say(line)

    def say(self, line: str) -> None:
        """Answer ``line``. One that cannot be answered is told why, and forgotten."""
        self.messages.append({"role": "user", "content": line})
        try:
            stream = self.llm.stream_chat(self.messages, self.sampling)
        except (RequestError, UsageError) as error:
            self.messages.pop()
            print(f"kvist: {error}", file=sys.stderr)
            return
        completion, _ = consume(self.llm, stream, show=True)
        print(flush=True)
        if completion.error is not None:
            print(f"kvist: the answer ended early: {completion.error}", file=sys.stderr)
        self.messages.append({"role": "assistant", "content": completion.text})
        self.completions.append(completion)
