"""Chat templates: the model's own Jinja text, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
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
        names = {"tools": None, "documents": None, **self._special, **values}
        try:
            self._template = self._template or _compile(self.source)
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **names
            )
        except Exception as error:  # a template is a program out of a file: it may fail in any way
            raise UsageError(
                f"the model's chat template cannot be used with these messages ({type(error).__name__}: {error}); "
                "change them, or write the prompt out and leave the template away (--no-chat-template)"
            ) from error


def _compile(source: str) -> Template:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the assistant's words for training; in a prompt it prints what it encloses."""

        tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            """Take the enclosed nodes as they are."""
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON: jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
