"""The sandbox of chat templates: no way out, and no more work or text than a prompt can need.

A template is a program out of a file from a stranger. Its loops, calls and filters spend one budget, and no step makes
something huge: what would be is refused before it is made. Nothing here looks at a clock, so that a template which
works does so on every machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

LONGEST = 1 << 24  # characters or elements that one step may make; a prompt of a million tokens has a quarter of it
WORK = 1 << 22  # steps of a render, each about a microsecond; a conversation of a thousand messages needs a tenth of it
CALL = 16  # steps that a call takes
ELEMENTS = 1 << 20  # of a value that is printed, joined or filtered, those of its parts included
BUDGET = "kvist.budget"  # where a render keeps what is left: no template can name it
_PASSES, _WEIGHED, _SPEND = "kvist_passes", "kvist_weighed", "kvist_spend"
_PASSED = "jinja_pass_arg"  # on a filter: jinja2 hands it its environment or context first
# Methods of a text whose result can be far longer than the text.
_PADDING = ("center", "ljust", "rjust", "zfill", "expandtabs")
_FORMATTING = ("format", "format_map")


class Budget:
    """What a render may still spend."""

    def __init__(self) -> None:
        """All of it."""
        self.left = WORK
        self.room = 4 * LONGEST  # what macros and blocks print is printed again by whoever calls them

    def spend(self, cost: int) -> None:
        """Take ``cost`` off; TemplateError when there is not as much."""
        self.left -= cost
        if self.left < 0:
            refuse(f"it takes more than {WORK} steps, which no prompt needs")

    def print(self, size: int) -> None:
        """Count ``size`` characters that are kept until the whole is joined."""
        self.room -= size
        if self.room < 0:
            refuse(f"it prints more than {4 * LONGEST} parts, {4 * LONGEST} are allowed")


def refuse(message: str) -> None:
    """Stop the template."""
    raise TemplateError(message)


class _Generation(Extension):
    """{% generation %} marks the assistant's words for training; in a prompt it prints what it encloses."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Any) -> nodes.Node:
        """Take the enclosed nodes as they are."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Counting(NodeTransformer):
    """Has loops and macros pay for every run of their bodies, and what enters a filter or is joined by ~ looked at."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802  jinja2 calls it so
        """Every element is paid for, looked at or skipped, and every pass."""
        _pay(node)
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _PASSES, 1 if node.test is None else _steps(node.test))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        """Every run is paid for."""
        _pay(node)
        self.generic_visit(node)
        return node

    visit_CallBlock = visit_Macro  # noqa: N815  the block of a call is a macro without a name

    def visit_Filter(self, node: nodes.Filter) -> nodes.Filter:  # noqa: N802
        """Weigh what it gets."""
        self.generic_visit(node)
        if node.name == _SPEND:
            return node
        if node.node is not None:
            node.node = _filtered(node.node, _WEIGHED)
        node.args = [_filtered(argument, _WEIGHED) for argument in node.args]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        """Weigh the parts, and what they make."""
        self.generic_visit(node)
        node.nodes = [_filtered(part, _WEIGHED) for part in node.nodes]
        return _filtered(node, _WEIGHED)


def _steps(node: nodes.Node) -> int:
    """Steps that one run of ``node`` takes."""
    return 1 + sum(1 for _ in node.find_all(nodes.Node)) // 8


def _pay(node: Any) -> None:
    """Put the price of the body in front of it."""
    price = nodes.Const(sum(map(_steps, node.body)), lineno=node.lineno)
    node.body = [nodes.ExprStmt(_filtered(price, _SPEND), lineno=node.lineno), *node.body]


def _filtered(node: Any, name: str, *values: int) -> nodes.Filter:
    arguments = [nodes.Const(value, lineno=node.lineno) for value in values]
    return nodes.Filter(node, name, arguments, [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, and bounds on what it lets through."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """With what chat templates expect to find."""
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize
        )
        self.__dict__["concat"] = _concat  # joins what a template, a macro or a block prints
        self.filters |= {_PASSES: _passes, _WEIGHED: _weighed, _SPEND: _spend, "tojson": _to_json}
        for name in ("center", "indent", "format", "batch", "slice", "replace", "join"):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        self.globals |= {"raise_exception": refuse, "strftime_now": lambda form: datetime.now().strftime(form)}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``, unless the result would be huge."""
        if operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple | Mapping) else (right,)
            _refuse_format(left, values)
        elif operator == "+":
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _refuse_long("+", len(left) + len(right))
        else:
            _refuse_product(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, *args: Any, **settings: Any) -> Any:
        """Call, unless it is a method of a text that would make a huge one."""
        budget = _budget(context)
        budget.spend(CALL + sum(size_of(argument, budget) // 64 for argument in (*args, *settings.values())))
        # The sandbox wraps str.format in a function of its own.
        method = getattr(function, "__wrapped__", function)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            _refuse_method(owner, getattr(method, "__name__", ""), args, settings)
        return super().call(context, function, *args, **settings)


def _budget(context: Context) -> Budget:
    budget = context.parent.get(BUDGET)
    if not isinstance(budget, Budget):
        raise TemplateError("no budget was given for this render")
    return budget


def size_of(value: Any, budget: Budget | None = None) -> int:
    """Characters and elements that printing ``value`` would make. TemplateError beyond LONGEST, before it is made."""
    if isinstance(value, str):  # nearly always
        total, seen = len(value), 1
    else:
        total, seen, stack = 0, 0, [value]
        while stack and total <= LONGEST and seen <= ELEMENTS:
            item = stack.pop()
            seen += 1
            if isinstance(item, str):
                total += len(item)
            elif isinstance(item, Mapping):
                total += 1
                stack += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                total += 1
                stack += item
            elif isinstance(item, int):
                total += 1 + item.bit_length() // 3
            else:
                total += 1
    if budget is not None:
        budget.spend(seen // 4)
    if seen > ELEMENTS:
        refuse(f"a value has more than {ELEMENTS} parts, {ELEMENTS} are allowed")
    _refuse_long("a value", total)
    return total


@pass_context
def _passes(context: Context, values: Iterable[Any], cost: int) -> Iterator[Any]:
    budget = _budget(context)
    for value in values:
        budget.spend(cost)
        yield value


@pass_context
def _spend(context: Context, cost: int) -> None:
    _budget(context).spend(cost)


@pass_context
def _weighed(context: Context, value: Any) -> Any:
    budget = _budget(context)
    budget.spend(1 + size_of(value, budget) // 64)
    return value


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    budget = _budget(context)
    budget.print(len(value) if isinstance(value, str) else size_of(value, budget))
    return value


def _concat(parts: Iterable[str]) -> str:
    found, total = [], 0
    for part in parts:
        total += len(part)
        _refuse_long("the text", total)
        found.append(part)
    return "".join(found)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON: jinja2's own filter would escape <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **{k: _narrow(v) for k, v in options.items()})


def _narrow(value: Any) -> Any:
    """An indent that is no bomb."""
    if isinstance(value, int) and value > 64:
        refuse(f"an indent of {value} is not allowed: 64 are")
    return value


def _refuse_long(what: str, size: int) -> None:
    if size > LONGEST:
        refuse(f"{what} would have {size} parts, {LONGEST} are allowed")


def _refuse_product(operator: str, left: Any, right: Any) -> None:
    """Refuse a product or power whose result would be huge."""
    for value, count in ((left, right), (right, left)):
        if not isinstance(count, int):
            continue
        bits = value.bit_length() if isinstance(value, int) else 0
        size = bits * count if operator == "**" else len(value) * count if isinstance(value, str | list | tuple) else 0
        _refuse_long(operator, size)
        if operator == "**":
            return


def _refuse_format(text: str, values: Any) -> None:
    """Refuse widths beyond reason, written into the format or given, and fields that repeat something long."""
    given = values.values() if isinstance(values, Mapping) else values
    widths = [int(digits) for digits in re.findall(r"\d{1,18}", text)]
    if re.search(r"\d{19}", text):
        refuse(f"a width beyond {LONGEST} is not allowed")
    fields = text.count("%") + text.count("{")
    longest = max((size_of(value) for value in given), default=0)
    # A number is a width where a star or a field within a field asks for one; elsewhere it is printed.
    asked = "*" in text or re.search(r"\{[^{}]*\{", text) is not None
    starred = max((value for value in given if isinstance(value, int)), default=0) if asked else 0
    _refuse_long("a formatted text", len(text) + sum(widths) + fields * (longest + starred))


def _refuse_method(text: str, name: str, args: Any, settings: Mapping[str, Any]) -> None:
    """Refuse a method of ``text`` whose result would be huge."""
    given = (*args, *settings.values())
    if name in _FORMATTING:
        _refuse_format(text, {**dict(enumerate(args)), **settings})
    elif name in _PADDING:
        width = max((value for value in given if isinstance(value, int)), default=8)
        _refuse_long("padding", width * (1 + text.count("\t") if name == "expandtabs" else 1))
    elif name == "replace" and len(args) >= 2 and all(isinstance(value, str) for value in args[:2]):
        _refuse_long("a replacement", len(text) + text.count(args[0]) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _refuse_long("a joined text", size_of(args[0]) + len(text) * len(args[0]))


def _bounded_filter(name: str, plain: Any) -> Any:
    """A filter of the template language that refuses to make something huge."""

    def filtered(*args: Any, **settings: Any) -> Any:
        # Some filters are handed the environment first.
        value, *rest = args[1:] if hasattr(plain, _PASSED) else args
        if name == "join":
            values = value if isinstance(value, list | tuple) else list(value)
            separator = next((item for item in (*rest, *settings.values()) if isinstance(item, str)), "")
            _refuse_long("a joined text", size_of(values) + len(separator) * len(values))
            args = (*args[: -len(rest) - 1], values, *rest)
        elif name == "format":
            _refuse_format(str(value), {**dict(enumerate(rest)), **settings})
        elif isinstance(value, str):
            numbers = [item for item in (*rest, *settings.values()) if isinstance(item, int)]
            lines = 1 + value.count("\n") if name == "indent" else 1
            if name != "replace":
                _refuse_long("padding", lines * max(numbers, default=0))
            _refuse_method(value, name, tuple(rest), settings)
        elif any(isinstance(item, int) and item > LONGEST for item in (*rest, *settings.values())):
            refuse(f"a width beyond {LONGEST} is not allowed")
        return plain(*args, **settings)

    if hasattr(plain, _PASSED):
        setattr(filtered, _PASSED, getattr(plain, _PASSED))
    return filtered
