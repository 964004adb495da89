"""/v1/conversations by the OpenAI package, and responses that go on with them."""

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import (
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
)
from redis import Redis

from ledger.keys import Keys
from tests.support.whole_stack import MODEL, Door, WholeStack, wait_until

GREEDY: Any = {"model": MODEL, "temperature": 0}
LONG: Any = {
    "model": MODEL,
    "max_output_tokens": 800,
    "extra_body": {"ignore_eos": True, "seed": 3},
}
CALL: Any = {
    "type": "function_call", "call_id": "c1", "name": "heat", "arguments": '{"to": 90}',
}  # fmt: skip
ITEMS: Any = [
    {"role": "developer", "content": "Sing."},
    {"role": "user", "content": [{"type": "input_text", "text": "Hello!"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"role": "assistant", "content": "La."},
    CALL,
    {"type": "function_call_output", "call_id": "c1", "output": "done"},
]
# In the words of chat.
MESSAGES: Any = [
    {"role": "system", "content": "Sing."},
    {"role": "user", "content": "Hello!"},
    {
        "role": "assistant",
        "content": "La.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "heat", "arguments": '{"to": 90}'},
            }
        ],
    },
    {"role": "tool", "content": "done", "tool_call_id": "c1"},
]


def items_of(client: OpenAI, id: str, **query: Any) -> list[Any]:
    """The oldest first, three at a time."""
    return list(client.conversations.items.list(id, order="asc", limit=3, **query))


def said_in(client: OpenAI, id: str) -> list[tuple[str, str]]:
    return [(each.role, each.content[0].text) for each in items_of(client, id)]


def chat(client: OpenAI, messages: Any) -> str:
    answer = client.chat.completions.create(**GREEDY, messages=messages)
    return answer.choices[0].message.content or ""


def test_it_is_made_looked_at_changed_and_deleted(client: OpenAI) -> None:
    made = client.conversations.create(metadata={"of": "me"}, items=ITEMS)
    assert (made.object, made.metadata) == ("conversation", {"of": "me"})
    assert client.conversations.retrieve(made.id) == made
    changed = client.conversations.update(made.id, metadata={"of": "you"})
    assert (changed.metadata, changed.created_at) == ({"of": "you"}, made.created_at)
    found = items_of(client, made.id)
    kinds = ["message", "message", "reasoning", "message", "function_call", "function_call_output"]
    assert [each.type for each in found] == kinds
    assert [each.content[0].text for each in (found[0], found[1], found[3])] == [
        "Sing.", "Hello!", "La.",
    ]  # fmt: skip
    assert (found[4].name, found[4].arguments, found[5].output) == ("heat", '{"to": 90}', "done")
    assert list(client.conversations.items.list(made.id)) == found[::-1]
    for each in found:
        assert client.conversations.items.retrieve(each.id, conversation_id=made.id) == each
    gone = client.conversations.items.delete(found[1].id, conversation_id=made.id)
    assert gone == changed
    assert items_of(client, made.id) == [found[0], *found[2:]]
    with pytest.raises(NotFoundError, match="has none of that name"):
        client.conversations.items.retrieve(found[1].id, conversation_id=made.id)
    # Dumps of its own are taken.
    added = client.conversations.items.create(made.id, items=[each.to_dict() for each in found])
    assert added.object == "list"
    assert (added.first_id, added.last_id) == (added.data[0].id, added.data[-1].id)
    assert items_of(client, made.id)[5:] == added.data
    assert len({each.id for each in items_of(client, made.id)}) == 11
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    for ask in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(NotFoundError, match=r"--files-hours"):
            ask(made.id)


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_pages_are_turned_while_what_was_on_them_is_deleted(
    client: OpenAI, order: Any, kept: int
) -> None:
    """All, or all but every other one, or but the last of each page."""
    said: Any = [{"role": "user", "content": str(number)} for number in range(7)]
    talk = client.conversations.create(items=said)
    ids = [each.id for each in items_of(client, talk.id)]
    found = []
    for each in client.conversations.items.list(talk.id, limit=3, order=order):
        found.append(each.id)
        if not kept or len(found) % (kept + 1):
            client.conversations.items.delete(str(each.id), conversation_id=talk.id)
    assert found == (ids if order == "asc" else ids[::-1])
    assert len(items_of(client, talk.id)) == (7 // (kept + 1) if kept else 0)


def test_a_response_answers_what_is_there_already(client: OpenAI) -> None:
    """Its client has added the question, and has no other one."""
    id = client.conversations.create(items=[{"role": "user", "content": "The chef"}]).id
    asked: Any = {"model": MODEL, "conversation": id}
    counted = client.responses.input_tokens.count(**asked)
    response = client.responses.create(**asked, max_output_tokens=4, temperature=0)
    assert response.usage is not None
    assert response.usage.input_tokens == counted.input_tokens > 0
    assert [item.id for item in items_of(client, id)][1:] == [response.output[0].id]
    alike = client.responses.create(
        model=MODEL, input="The chef", max_output_tokens=4, temperature=0, service_tier="fast"
    )
    assert response.output_text == alike.output_text
    again = client.responses.create(model=MODEL, previous_response_id=alike.id, max_output_tokens=2)
    assert again.usage is not None
    assert again.usage.input_tokens > counted.input_tokens
    with pytest.raises(BadRequestError, match="input: must hold at least one message"):
        client.responses.create(model=MODEL)


def test_a_response_goes_on_with_it_and_becomes_a_part_of_it(client: OpenAI) -> None:
    id = client.conversations.create().id
    assert items_of(client, id) == []
    first = client.responses.create(**GREEDY, conversation=id, input="Hello!")
    assert first.conversation is not None
    assert first.conversation.id == id
    assert client.responses.retrieve(first.id) == first
    said = [("user", "Hello!"), ("assistant", first.output_text)]
    assert said_in(client, id) == said
    # Its own id, as the answer had it.
    assert items_of(client, id)[-1].id == first.output[0].id
    asked: Any = {"conversation": {"id": id}, "input": "And now?"}
    counted = client.responses.input_tokens.count(model=MODEL, **asked)
    stream = list(client.responses.create(**GREEDY, **asked, instructions="Sing.", stream=True))
    second: Any = stream[-1]
    messages: Any = [{"role": role, "content": text} for role, text in said]
    asked_last = {"role": "user", "content": "And now?"}
    system = {"role": "system", "content": "Sing."}
    assert second.response.output_text == chat(client, [system, *messages, asked_last])
    said += [("user", "And now?"), ("assistant", second.response.output_text)]
    # Its instructions are of no other.
    assert said_in(client, id) == said
    assert counted.input_tokens < second.response.usage.input_tokens
    # What was said stays when a response is gone.
    client.responses.delete(first.id)
    assert said_in(client, id) == said
    with pytest.raises(BadRequestError, match="must not be given with previous_response_id"):
        client.responses.create(
            **GREEDY, conversation=id, input="x", previous_response_id=second.response.id
        )
    with pytest.raises(BadRequestError, match="conversation: needs store"):
        client.responses.create(**GREEDY, conversation=id, input="x", store=False)


def test_what_a_response_was_asked_is_one_item_wherever_it_is_told(client: OpenAI) -> None:
    """Of itself and of its conversation: who deletes it there deletes no other."""
    id = client.conversations.create(items=[{"role": "user", "content": "Hello!"}]).id
    response = client.responses.create(
        **GREEDY, conversation=id, input="And now?", max_output_tokens=2
    )
    asked, before = client.responses.input_items.list(response.id)
    assert (asked.content[0].text, before.content[0].text) == ("And now?", "Hello!")  # type: ignore[index, union-attr]
    for each, is_there in ((before, False), (asked, True)):
        try:
            client.conversations.items.delete(str(each.id), conversation_id=id)
        except NotFoundError:
            assert not is_there
    assert said_in(client, id) == [("user", "Hello!"), ("assistant", response.output_text)]


def test_calls_and_reasoning_in_it_are_as_in_chat(client: OpenAI) -> None:
    id = client.conversations.create(items=ITEMS).id
    more = {"role": "user", "content": "More."}
    response = client.responses.create(**GREEDY, conversation=id, input="More.")
    assert response.output_text == chat(client, [*MESSAGES, more])
    call, output = items_of(client, id)[4:6]
    client.conversations.items.delete(call.id, conversation_id=id)
    client.conversations.items.delete(output.id, conversation_id=id)
    response = client.responses.create(
        **GREEDY, conversation=id, input="More.", max_output_tokens=2
    )
    # What was cut off is told as such.
    last = items_of(client, id)[-1]
    assert (last.id, last.status) == (response.output[0].id, "incomplete")


def test_one_response_at_a_time_in_the_background_too(
    client: OpenAI, whole_stack: WholeStack
) -> None:
    id = client.conversations.create().id
    with whole_stack.held():
        first = client.responses.create(**LONG, conversation=id, input="Bread?", background=True)
        with pytest.raises(BadRequestError, match=rf"{first.id} has not ended yet") as refused:
            client.responses.create(**GREEDY, conversation=id, input="x")
        assert refused.value.param == "conversation"
        # What is added meanwhile is told; what was asked, once there is an answer.
        client.conversations.items.create(id, items=[{"role": "user", "content": "Well?"}])
        assert said_in(client, id) == [("user", "Well?")]
        # One that is stopped leaves nothing behind.
        assert client.responses.cancel(first.id).status == "cancelled"
    assert said_in(client, id) == [("user", "Well?")]
    second = client.responses.create(**GREEDY, conversation=id, input="Soup?", background=True)
    wait_until(lambda: client.responses.retrieve(second.id).completed_at, "it has ended")
    text = client.responses.retrieve(second.id).output_text
    assert said_in(client, id) == [("user", "Well?"), ("user", "Soup?"), ("assistant", text)]


def test_of_several_at_once_one_goes_on_with_it(client: OpenAI) -> None:
    """The others are told so, and what they asked is nowhere."""
    id = client.conversations.create().id

    def ask(number: int) -> str:
        try:
            response = client.responses.create(
                **GREEDY, conversation=id, input=f"{number}?", max_output_tokens=8
            )
        except (BadRequestError, InternalServerError) as error:
            return "" if error.status_code in (400, 503) else str(error)
        return str(response.output_text)

    with ThreadPoolExecutor(8) as several:
        answers = list(several.map(ask, range(8)))
    told = [text for text in answers if text]
    found = said_in(client, id)
    assert told
    assert len(found) == 2 * len(told)
    assert sorted(text for role, text in found if role == "assistant") == sorted(told)
    for number, text in enumerate(answers):
        assert (("user", f"{number}?") in found) == bool(text)


def test_the_same_request_again_is_a_part_of_it_once(
    client: OpenAI, whole_stack: WholeStack
) -> None:
    id = client.conversations.create().id
    named: Any = {"extra_headers": {"idempotency-key": f"{id}-1"}}
    asked: Any = {**GREEDY, "conversation": id, "input": "Hello!"}
    first = client.responses.create(**asked, **named)
    client.conversations.items.create(id, items=[{"role": "user", "content": "Well?"}])
    with whole_stack.held():
        other = client.responses.create(**LONG, conversation=id, input="Soup?", background=True)
        assert client.responses.create(**asked, **named) == first
        client.responses.cancel(other.id)
    assert len(items_of(client, id)) == 3


def test_nothing_of_it_is_anybody_elses(
    tmp_path: Path, another_door: Callable[..., Door], whole_stack: WholeStack
) -> None:
    keys = tmp_path / "keys.toml"
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "bob")}
    keys.write_text(
        f'[tenants.alice]\nkeys = ["sha256:{digest["alice"]}"]\n'
        f'[tenants.bob]\nkeys = ["sha256:{digest["bob"]}"]\n'
    )
    door = another_door(api_keys_file=keys)
    with OpenAI(base_url=door.openai, api_key="alice", max_retries=0) as alice:
        bob = alice.with_options(api_key="bob")
        id = alice.conversations.create(items=ITEMS).id
        item = items_of(alice, id)[0].id
        asks: list[Callable[[], Any]] = [
            lambda: bob.conversations.retrieve(id),
            lambda: bob.conversations.update(id, metadata={}),
            lambda: bob.conversations.delete(id),
            lambda: items_of(bob, id),
            lambda: bob.conversations.items.create(id, items=ITEMS),
            lambda: bob.conversations.items.retrieve(item, conversation_id=id),
            lambda: bob.conversations.items.delete(item, conversation_id=id),
        ]
        for ask in asks:
            with pytest.raises(NotFoundError):
                ask()
        with pytest.raises(BadRequestError, match="which is not here"):
            bob.responses.create(**GREEDY, conversation=id, input="x")
        assert len(items_of(alice, id)) == 6
    with Redis.from_url(whole_stack.store.url) as store:
        assert store.ttl(Keys("0").conversation("alice", id)) > 47 * 3600


WRONG: Any = [
    ({"items": [{"role": "king", "content": "x"}]}, "items.0.role: must be one of"),
    ({"items": [{**CALL, "arguments": "{"}]}, "items.0.arguments: must be JSON"),
    ({"items": [{**ITEMS[-1], "call_id": ""}]}, "items.0.call_id: "),
    ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items.0.type: must be message"),
    ({"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "items.0.content.0.type"),
    ({"items": [{"role": "user", "content": "x"}] * 21}, "items: list should have at most 20"),
    ({"items": [{"role": "user", "content": "x" * 200_000}]}, "items: the prompt has 200000 bytes"),
    ({"metadata": {"k": "v" * 513}}, "metadata: must have keys of at most"),
]


@pytest.mark.parametrize(("asked", "rule"), WRONG)
def test_what_is_wrong_is_named(client: OpenAI, asked: Any, rule: str) -> None:
    with pytest.raises(BadRequestError, match=rule):
        client.conversations.create(**asked)


def test_an_id_that_is_none(client: OpenAI) -> None:
    for ask in (client.conversations.retrieve, client.conversations.delete):
        with pytest.raises(BadRequestError, match=r"id: must match conv_"):
            ask("conv_1")


def test_what_items_are_to_include_is_there_or_refused(client: OpenAI) -> None:
    """By whatever tells some of them."""
    talk = client.conversations.create(items=ITEMS[:1]).id
    items = client.conversations.items
    (known,) = items.list(talk, include=["reasoning.encrypted_content"])
    for asked, rule in (
        ("message.output_text.logprobs", "is not kept with items"),
        ("web_search_call.results", "must be of message.output_text.logprobs, reasoning.enc"),
    ):
        include: Any = [asked]
        asks: Any = (
            partial(items.list, talk),
            partial(items.retrieve, str(known.id), conversation_id=talk),
            partial(items.create, talk, items=ITEMS[:1]),
        )
        for ask in asks:
            with pytest.raises(BadRequestError, match=f"^.*include: .*{rule}"):
                ask(include=include)
    assert len(items.list(talk).data) == 1
