"""Chat templates: the model's own Jinja text, rendered in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvist.base.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]


class ChatTemplate:
    """A chat template and the special tokens it may name. Compiled at its first use, which takes a while."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        """Keep ``source`` and ``special`` (bos_token, eos_token, ... as spelled)."""
        self.source = source
        self._special = dict(special)
        self._template: Template | None = None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **values: Any) -> str:
        """The prompt of ``messages`` ({"role", "content"}), ending where the assistant's answer begins.

        ``values`` are further names for the template (tools, documents). UsageError when the template refuses the
        messages or cannot be used at all.
        """
        from kvist.text.sandbox import BUDGET, Budget, Sandbox

        names = {"tools": None, "documents": None, **self._special, **values, BUDGET: Budget()}
        try:
            self._template = self._template or Sandbox().from_string(self.source)
            return self._template.render(
                {"messages": [dict(message) for message in messages], "add_generation_prompt": add_generation_prompt}
                | names
            )
        except Exception as error:  # a template is a program out of a file: it may fail in any way
            raise UsageError(
                f"the model's chat template cannot be used with these messages ({type(error).__name__}: {error}); "
                "change them, or write the prompt out and leave the template away (--no-chat-template)"
            ) from error
