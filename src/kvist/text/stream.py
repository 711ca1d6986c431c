"""Ids to printable text as they arrive: never half a character, never a stop string, constant work per token.

The pieces joined are the whole text: what is printed does not depend on how it was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence

from kvist.base.errors import BadSampling


class StopStrings:
    """Finds the first of several strings to complete, character by character (Aho and Corasick, 1975).

    A state is the longest end of the text that begins some stop string; ``depth[state]`` is its length. Where two stop
    strings complete at one character, the longer one is found. BadSampling for an empty one.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """Build the automaton of ``stop``: one state per distinct beginning."""
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.found: list[str | None] = [None]
        for text in stop:
            if not text:
                raise BadSampling("stop holds an empty string, which every text contains: leave it out")
            self._insert(text)
        self.fall = [0] * len(self.next)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for character in text:
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(None)
            state = self.next[state][character]
        self.found[state] = text

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            # A shorter stop string may end where this beginning ends.
            self.found[state] = self.found[state] or self.found[self.fall[state]]
            for character, child in self.next[state].items():
                self.fall[child] = self.step(self.fall[state], character)
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """The state after ``character``."""
        while state and character not in self.next[state]:
            state = self.fall[state]
        return self.next[state].get(character, 0)


class TextStream:
    """Printable text of one request, from ids given one by one.

    ``spell`` gives the bytes of an id (b"" for ids that are never printed). ``drop_space``: a space at the very start
    belongs to the vocabulary's way of writing, not to the text. ``stopped_by`` is the stop string that completed first;
    nothing is printed from its first character on.
    """

    def __init__(self, spell: Callable[[int], bytes], stop: Sequence[str] = (), *, drop_space: bool = False) -> None:
        """Start an empty text. BadSampling for an empty stop string."""
        self.stopped_by: str | None = None
        self._spell = spell
        self._drop_space = drop_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings(stop) if stop else None
        self._state = 0
        self._held = ""  # may still become a stop string; its length is the depth of the state

    def push(self, token_id: int) -> str:
        """What may be printed after ``token_id``: "" while half a character or a possible stop string is held back."""
        if self.stopped_by is not None:
            return ""
        return self._take(self._decoder.decode(self._spell(token_id)))

    def finish(self) -> str:
        """What was held back, at the end of the ids. Bytes that never became a character print as U+FFFD."""
        if self.stopped_by is not None:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        held, self._held, self._state = self._held, "", 0
        return text + held if self.stopped_by is None else text

    def _take(self, text: str) -> str:
        if text and self._drop_space:
            self._drop_space = False
            text = text.removeprefix(" ")
        if self._stops is None or not text:
            return text
        stops, state = self._stops, self._state
        for index, character in enumerate(text):
            state = stops.step(state, character)
            found = stops.found[state]
            if found is not None:
                self.stopped_by = found
                seen = self._held + text[: index + 1]
                self._held = ""
                return seen[: len(seen) - len(found)]
        self._state = state
        seen = self._held + text
        keep = len(seen) - stops.depth[state]
        self._held = seen[keep:]
        return seen[:keep]
