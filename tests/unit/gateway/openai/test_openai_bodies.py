"""What a body costs to read is bounded before it is read."""

import json
import reprlib
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.json_body import STRINGS_MAX, VALUES_MAX, JsonBody
from gateway.openai.chat import ChatBody
from gateway.openai.completions import CompletionBody
from gateway.openai.request_body import parse
from gateway.openai.responses.body import ResponseBody
from gateway.openai.tokenize import DetokenizeBody, TokenizeBody
from service_kit.errors import InvalidRequest
from tests.support.cpu_cost import costs_at_most

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

    def refuse() -> None:
        with pytest.raises(InvalidRequest, match=TOO_MANY):
            JsonBody.of(body)

    # No more than a few looks at each byte; read in full the first takes twenty times as much.
    costs_at_most(4, work=refuse, yardstick=lambda: sum(body))


def test_a_prompt_may_be_full_of_what_structure_is_made_of() -> None:
    text = '[{"a\\": 1}, ' * 300_000
    assert read(CompletionBody, {"prompt": text}).prompt == text
    messages = [{"role": "user", "content": text}]
    assert read(ChatBody, {"messages": messages}).messages[0].text() == text


def test_as_many_ids_as_a_large_context_has_are_read() -> None:
    assert len(read(DetokenizeBody, {"tokens": [1] * 131_072}).tokens) == 131_072


def read(kind: Any, content: Any) -> Any:
    return parse(kind, JsonBody.of(json.dumps(content).encode()))


# As many as a body may have, and wrong at the end, where it is found last.
MANY = VALUES_MAX - 100
WRONG = [
    (CompletionBody, "prompt", [1] * MANY + [None]),
    (CompletionBody, "prompt", [[1] * MANY + [None]]),
    (CompletionBody, "prompt", [1.5] * MANY),
    (CompletionBody, "prompt", ["a"] * (STRINGS_MAX - 100) + [None]),
    (CompletionBody, "prompt", [[1]] * 16_000 + [[None]]),
    (CompletionBody, "stop", [1] * MANY),
    (CompletionBody, "stop", ["a"] * (STRINGS_MAX - 100) + [None]),
    (CompletionBody, "stop_token_ids", [None] * MANY),
    (CompletionBody, "allowed_token_ids", ["1"] * (STRINGS_MAX - 100)),
    (CompletionBody, "bad_words_token_ids", [None] * MANY),
    (CompletionBody, "bad_words_token_ids", [[None] * MANY]),
    (CompletionBody, "logit_bias", {str(each): None for each in range(30_000)}),
    (ChatBody, "messages", [None] * MANY),
    (ChatBody, "messages", [{}] * 16_000),
    (ChatBody, "messages", [{"role": "user", "content": [None] * MANY}]),
    (ChatBody, "messages", [{"role": "user", "content": [{}] * 16_000}]),
    (ChatBody, "messages", [{str(each): None for each in range(30_000)}]),
    (ChatBody, "chat_template_kwargs", {str(each): [] for each in range(10_000)}),
    (TokenizeBody, "messages", [{"role": 1}] * 8_000),
    (DetokenizeBody, "tokens", [None] * MANY),
]


@pytest.mark.parametrize(("kind", "field", "value"), WRONG, ids=reprlib.repr)
def test_of_many_mistakes_the_first_is_told(kind: Any, field: str, value: object) -> None:
    """A complaint takes about a kilobyte: of all of them there would be hundreds of megabytes."""
    content = {"prompt": "x"} if kind is CompletionBody else {}
    body = JsonBody.of(json.dumps(content | {field: value}).encode())
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest) as caught:
            parse(kind, body)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught.value.field.startswith(field)
    # A few numbers of a list are told, not every one: at most what the values themselves take.
    assert peak_bytes < 12e6


def test_a_body_is_given_up_when_it_is_read() -> None:
    body = JsonBody.of(b'{"prompt": "x"}')
    assert parse(CompletionBody, body).prompt == "x"
    assert len(body) == 0


@given(
    st.recursive(st.text() | st.integers(), lambda c: st.lists(c) | st.dictionaries(st.text(), c)),
    st.lists(st.integers(0, 400)),
)
def test_bodies_may_be_cut_anywhere(content: object, cuts: list[int]) -> None:
    """The same counts and bytes, whether the network brings it whole or in pieces."""
    raw = json.dumps({"a": content}).encode()
    whole, cut = JsonBody.of(raw), JsonBody()
    places = sorted({0, len(raw), *(at for at in cuts if at < len(raw))})
    for start, end in pairwise(places):
        cut.feed(raw[start:end])
    assert counts(cut) == counts(whole)
    assert cut.digest == whole.digest
    assert cut.take() == {"a": content}


def counts(body: JsonBody) -> tuple[int, int, int, bool]:
    return body._commas, body._quotes, body._containers, body._is_in_string


@settings(max_examples=50)
@given(
    st.recursive(st.text() | st.integers(), lambda c: st.lists(c) | st.dictionaries(st.text(), c))
)
def test_strings_are_told_from_structure(content: object) -> None:
    """Lists and objects are counted outside of strings only, whatever these hold."""
    body = JsonBody.of(json.dumps(content).encode())
    assert body._containers == _count(content, list) + _count(content, dict)
    assert body._quotes == 2 * _count(content, str)


def _count(content: object, kind: type) -> int:
    own = int(isinstance(content, kind))
    if isinstance(content, dict):
        content = [*content, *content.values()]
    return own + sum(_count(each, kind) for each in content) if isinstance(content, list) else own


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (ChatBody, {"messages": [], "stream_options": {"include_usage": None}}),
        (ResponseBody, {"input": "", "stream_options": {"include_obfuscation": None}}),
        (DetokenizeBody, {"tokens": [1], "skip_special_tokens": None}),
    ],
)
def test_null_says_nothing_deep_inside_too(kind: Any, content: Any) -> None:
    read(kind, content)
