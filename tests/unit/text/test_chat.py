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


def test_the_callers_messages_stay() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(UsageError):
        ChatTemplate("{% set _ = messages[0].update({'content': 'x'}) %}", {}).render(messages)
    assert messages == USER
