from __future__ import annotations

import json
import resource
import time

import pytest

from kvist.base.errors import UsageError
from kvist.text.chat import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, **values: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(USER, **values)


def test_blocks_leave_no_white_space() -> None:
    source = (
        "{%- for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content }}]\n    {% endif %}\n{% endfor %}\n"
    )
    assert render(source) == "[Hi]\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>Hi</s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ('{{ {"a": "<é>"} | tojson }}', '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% if tools %}t{% else %}none{% endif %}", "none"),
        ("{{ messages[0].content.strip() }}", "Hi"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
    ],
)
def test_a_template_that_fails_says_so(source: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        render(source)


@pytest.mark.parametrize(
    "expression",
    [
        "'x' * 10 ** 10",
        "10 ** 9 * [1]",
        "10 ** (10 ** 10)",
        "(10 ** 300) ** (10 ** 8)",
        "'%2000000000d' % 1",
        "'%*d' % (2000000000, 1)",
        "'{:{}}'.format(1, 2000000000)",
        "'x'.ljust(10 ** 10)",
        "'{:>2000000000}'.format(1)",
        "'x' | center(10 ** 10)",
        "'x' | indent(10 ** 10, first=true)",
        "'%2000000000d' | format(1)",
        "range(10 ** 9) | list",
    ],
)
def test_no_step_makes_something_huge(expression: str) -> None:
    with pytest.raises(UsageError, match=r"allowed|too big|OverflowError"):
        render("{{ (" + expression + ") | string | length }}")


@pytest.mark.parametrize(
    "expression",
    [
        "cycler.__init__.__globals__",
        "lipsum.__globals__['os']",
        "self.__init__.__globals__",
        "messages.__class__.__base__",
        "''.format.__self__.__class__",
        "'{0.__class__}'.format(messages)",
        "joiner.__init__",
        "namespace.__init__.__globals__",
        "(messages | map(attribute='__class__') | list)[0].__mro__",
        "messages | attr('__class__')",
    ],
)
def test_no_way_out_of_the_sandbox(expression: str) -> None:
    """Either refused, or nothing comes of it: never a class, a module or a function's globals."""
    try:
        text = render("{{ " + expression + " }}")
    except UsageError:
        return
    assert "<class" not in text and "module" not in text and "builtin" not in text, text


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(999) %}"
        + "{% if a == b %}x{% endif %}" * 2000
        + "{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [1, 2] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
        "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x + s.x %}{% endfor %}",
        "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{% set s = namespace(x=[1]) %}{% for i in range(60) %}{% set s.x = [s.x, s.x] %}{% endfor %}{{ s.x }}",
        "{% for i in range(9999) %}{{ 'b' * 100000 }}{% endfor %}",
        "{% set x %}{% for i in range(9999) %}{{ 'b' * 100000 }}{% endfor %}{% endset %}",
        "{{ ('a' * 100000) | replace('a', 'b' * 10000) | length }}",
        "{{ ('a' * 100000).replace('a', 'b' * 10000) | length }}",
        "{{ ','.join(['a' * 100000] * 10000) | length }}",
        "{{ (['a' * 100000] * 10000) | join(',') | length }}",
        "{{ (['a' * 100000] * 10000) | string | length }}",
        "{{ [['a' * 100000] * 10000] | tojson | length }}",
        "{{ ('{0}' * 10000).format('a' * 100000) | length }}",
        "{{ (('%(a)s' * 10000) % {'a': 'a' * 100000}) | length }}",
        "{{ ('\\t' * 10000).expandtabs(100000) | length }}",
        "{{ ('\\n' * 10000) | indent(100000) | length }}",
    ],
)
def test_no_template_works_for_ever_or_fills_the_memory(source: str) -> None:
    begin, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UsageError, match=r"more than \d+ steps|parts, \d+ are allowed"):
        render(source)
    assert time.process_time() - begin < 20  # it ended; without a bound it would be years
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 256 << 10


@pytest.mark.parametrize("step", ["strip()", "split(':')", "replace('e', 'é')", "startswith('x')", "upper()"])
def test_a_long_number_in_a_message_is_no_width(step: str) -> None:
    """JSON in a message was once taken for a format."""
    content = '{"phone": 5551234567, "share": "100 %d"}'
    assert ChatTemplate("{{ messages[0].content." + step + " }}", {}).render([{"role": "user", "content": content}])
    assert render("{{ '" + content + "' | indent | trim }}") == content
    assert render("{{ '%d at {}' % 1764547200 }}{{ '{}'.format(5551234567) }}") == "1764547200 at {}5551234567"


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}}}}]
# What published templates do, in few lines: namespaces, reversed lists, macros, filters of filters, white space.
USUAL = [
    "{% set ns = namespace(found=false) %}{% for m in messages[::-1] %}{% if not ns.found and m.role == 'user' %}"
    "{% set ns.found = true %}{{ loop.index0 }}{% endif %}{% endfor %}",
    "{% macro one(m) -%}<|{{ m['role'] }}|>\n{{ m.content | trim }}<|end|>{%- endmacro %}"
    "{% for m in messages %}{{ one(m) }}{{ '\\n' if not loop.last }}{% endfor %}",
    "{{ tools | tojson(indent=4) }}{% for t in tools %}{{ t.function | tojson }}"
    "{{ t.function.name ~ ':' ~ loop.length }}{% endfor %}",
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('\\n\\n') }}",
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest if m.content is string and m.content | length > 1 %}{{ loop.cycle('a', 'b') }}{{ m.content }}"
    "{% else %}nobody{% endfor %}",
    "{% set text = messages[-1].content %}{{ text.split('</think>')[-1].lstrip('\\n') + '!' }}",
    "{{ '%s-%02d' % ('x', 3) }}{{ '{:>4}|{a}'.format(1, a=2) }}",
    "{% for k, v in tools[0].function.items() %}{{ k }}={{ v }};{% endfor %}{{ '-' * 8 }}{{ [1] + [2] }}",
    "{% for a in [1, [2]] recursive %}{{ loop.depth }}{% if a is iterable %}{{ loop(a) }}{% endif %}{% endfor %}",
    "{% macro f() %}<{{ caller(1) }}>{% endmacro %}{% call(x) f() %}[{{ x }}]{% endcall %}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}{{ none }}{{ undefined_name }}{{ 1.5 }}",
]


@pytest.mark.parametrize("source", USUAL)
def test_bounds_change_nothing_that_templates_usually_do(source: str) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hello <b>\n{x} 5551234567 "},
        {"role": "assistant", "content": "<think>no</think>\nYes"},
        {"role": "user", "content": "?"},
    ]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    right = plain.from_string(source).render(messages=messages, tools=TOOLS)
    assert ChatTemplate(source, {}).render(messages, tools=TOOLS) == right != ""


def test_a_long_conversation_is_far_from_the_bounds() -> None:
    source = "{% macro one(m) %}{{ m.role | upper }}: {{ m.content | trim }}{% endmacro %}" + (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ one(m) }}\n{% endif %}{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 400} for i in range(4000)]
    assert len(ChatTemplate(source, {}).render(messages)) > 4000 * 2000


def test_no_file_is_read() -> None:
    for source in ("{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends '/etc/passwd' %}"):
        with pytest.raises(UsageError):
            render(source)


def test_ordinary_arithmetic_stays() -> None:
    assert render("{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ 7 % 4 }}{{ '%03d' % 7 }}{{ 'x'.ljust(3) }}|") == "ababab10243007x  |"


def test_the_callers_messages_stay() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(UsageError):
        ChatTemplate("{% set _ = messages[0].update({'content': 'x'}) %}", {}).render(messages)
    assert messages == USER
