from __future__ import annotations

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
