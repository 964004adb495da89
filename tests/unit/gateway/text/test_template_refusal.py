"""Which message a chat template complains of."""

from typing import Any

import pytest

from gateway.text.chat_template import ChatTemplate, TemplateFailed
from gateway.text.template_refusal import refused_at

# As those of Mistral, Gemma and others: what a message may be is said where it is come to.
ALTERNATING = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set begun = messages[1:] -%}"
    "{%- else -%}{%- set begun = messages -%}{%- endif -%}"
    "{%- for m in begun -%}"
    "{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate') }}{%- endif -%}"
    "{{ m['content'].strip() }}{%- endfor -%}"
)
LAST = "{% if messages[-1]['role'] != 'user' %}{{ raise_exception('ask something') }}{% endif %}"
COUNTED = "{% if messages|length > 2 %}{{ raise_exception('not ' ~ messages|length) }}{% endif %}"
NEEDS_DATE = "{{ date.year }}{% for m in messages %}{{ m.content }}{% endfor %}"
NAMED = (
    "{% for m in messages %}{% if m.role == 'king' %}{{ raise_exception('no king') }}{% endif %}"
    "{% endfor %}"
)
SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def said(roles: str) -> list[dict[str, Any]]:
    words = {"s": "system", "u": "user", "a": "assistant", "k": "king"}
    return [{"role": words[each], "content": each} for each in roles]


def place(source: str, messages: list[dict[str, Any]]) -> int | None:
    template = ChatTemplate(source)
    with pytest.raises(TemplateFailed) as caught:
        template.render(messages)
    return refused_at(template.render, messages, caught.value)


@pytest.mark.parametrize(
    ("source", "roles", "at"),
    [
        (ALTERNATING, "uu", 1),
        (ALTERNATING, "suauuaua", 4),
        (ALTERNATING, "sa", 1),
        (ALTERNATING, "auau", 0),
        (NAMED, "uaku", 2),
        (NAMED, "k", 0),
        (LAST, "uaua", 3),
        # What is not about one of them.
        (NEEDS_DATE, "uau", None),
        (SLOW, "uau", None),
        (COUNTED, "uaua", None),
    ],
)
def test_it_is_the_one_with_which_it_begins_to_refuse(
    source: str, roles: str, at: int | None
) -> None:
    assert place(source, said(roles)) == at


def test_a_content_that_is_none() -> None:
    messages = said("uaua")
    messages[1]["content"] = None
    assert place(ALTERNATING, messages) == 1


def test_it_is_found_in_few_renderings() -> None:
    template, count = ChatTemplate(NAMED), 0

    def render(some: Any) -> str:
        nonlocal count
        count += 1
        return template.render(some)

    messages = said("u" * 1000 + "k" + "u" * 3000)
    assert refused_at(render, messages, TemplateFailed("no king")) == 1000
    assert count <= 14
