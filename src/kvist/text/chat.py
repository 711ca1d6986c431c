"""Chat templates: the model's own Jinja text, rendered in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvist.base.errors import UsageError

if TYPE_CHECKING:
    from jinja2 import Template

Message = Mapping[str, Any]

LONGEST = 1 << 22  # characters or elements that one step of a template may make; real prompts are far below


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

    class Bounded(ImmutableSandboxedEnvironment):
        """The sandbox, and no single step that makes something huge out of a few characters."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """``left operator right``, unless the result would be huge."""
            _refuse_huge(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, function: Any, *args: Any, **settings: Any) -> Any:
            """Call, unless a number given could be the width of a huge padding."""
            # The sandbox wraps str.format in a function of its own.
            owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
            if isinstance(owner, str):
                _refuse_wide(owner, args, settings)
            return super().call(context, function, *args, **settings)

    environment = Bounded(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    for name in ("center", "indent", "format", "batch", "slice"):
        environment.filters[name] = _bounded_filter(environment.filters[name])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON: jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse_huge(operator: str, left: Any, right: Any) -> None:
    """Refuse a product, power or formatting whose result would be huge."""
    if operator == "%" and isinstance(left, str):
        return _refuse_wide(left, right if isinstance(right, tuple) else (right,), {})
    for value, count in ((left, right), (right, left)):
        if not isinstance(count, int):
            continue
        bits = value.bit_length() if isinstance(value, int) else 0
        size = bits * count if operator == "**" else len(value) * count if isinstance(value, str | list | tuple) else 0
        if size > LONGEST:
            _refuse(f"{operator} would make something of {size} parts, {LONGEST} are allowed")
        if operator == "**":
            return None
    return None


def _refuse_wide(text: str, args: Any, settings: Mapping[str, Any]) -> None:
    """Refuse a number that pads a text beyond reason, given as an argument or written into a format."""
    numbers = [int(digits) for digits in re.findall(r"\d{6,18}", text) if "%" in text or "{" in text]
    numbers += [value for value in (*args, *settings.values()) if isinstance(value, int)]
    if any(number > LONGEST for number in numbers) or re.search(r"[%{][^}]*\d{19}", text):
        _refuse(f"a width beyond {LONGEST} is not allowed")


def _bounded_filter(plain: Any) -> Any:
    """A filter of the template language that refuses to pad beyond reason."""

    def filtered(value: Any, *args: Any, **settings: Any) -> Any:
        _refuse_wide(value if isinstance(value, str) else "", args, settings)
        return plain(value, *args, **settings)

    return filtered


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
