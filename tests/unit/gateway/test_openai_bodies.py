"""What a body costs to read is bounded before it is read."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway import openai_models
from gateway.openai_models import ChatBody, CompletionBody, DetokenizeBody, parse
from service_kit.errors import InvalidRequest

TOO_MANY = "the body must have at most"
BYTES = 16_000_000


@pytest.mark.parametrize(
    ("head", "item"),
    [
        (b'{"prompt":[', b"[1],"),
        (b'{"prompt":[', b"1,"),
        (b'{"prompt":[', b'"",'),
        (b'{"prompt":[', b"{},"),
        (b"", b"["),
        # An unfinished string of escaped quotes, behind enough brackets to be looked at.
        (b"[" * 20_000 + b'"', b'\\"'),
    ],
)
def test_sixteen_megabytes_of_anything_are_refused_at_once(head: bytes, item: bytes) -> None:
    body = head + item * (BYTES // len(item))
    begin_s = time.thread_time()
    with pytest.raises(InvalidRequest, match=TOO_MANY):
        parse(CompletionBody, body)
    # Of processor time, on a busy machine; read in full some of them take six seconds.
    assert time.thread_time() - begin_s < 1.0


def test_a_prompt_may_be_full_of_what_structure_is_made_of() -> None:
    text = '[{"a\\": 1}, ' * 300_000
    assert parse(CompletionBody, json.dumps({"prompt": text}).encode()).prompt == text
    messages = [{"role": "user", "content": text}]
    assert parse(ChatBody, json.dumps({"messages": messages}).encode()).messages[0].text() == text


def test_as_many_ids_as_a_large_context_has_are_read() -> None:
    body = json.dumps({"tokens": [1] * 1_000_000}).encode()
    assert len(parse(DetokenizeBody, body).tokens) == 1_000_000


@settings(max_examples=50)
@given(
    st.recursive(st.text() | st.integers(), lambda c: st.lists(c) | st.dictionaries(st.text(), c))
)
def test_strings_are_told_from_structure(content: object) -> None:
    """What is left between the strings is what json writes with every string empty."""
    raw = json.dumps(content).encode()
    bare = b"".join(openai_models.outside_strings(raw))
    assert bare.count(b"[") == _count(content, list)
    assert bare.count(b"{") == _count(content, dict)


def _count(content: object, kind: type) -> int:
    own = int(isinstance(content, kind))
    if isinstance(content, dict):
        content = list(content.values())
    return own + sum(_count(each, kind) for each in content) if isinstance(content, list) else own
