"""/v1/responses by the OpenAI package: a response outlives its client."""

import hashlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, ConflictError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.answers import until
from tests.support.whole_stack import MODEL, Door, WholeStack

GREEDY: Any = {"model": MODEL, "temperature": 0}
LONG: Any = {
    "model": MODEL,
    "max_output_tokens": 900,
    "extra_body": {"ignore_eos": True, "seed": 3},
}
EVENT = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
SAID = {"role": "user", "content": "Hello!"}
IMAGE = {"role": "user", "content": [{"type": "input_image"}]}


def events(client: OpenAI, **asked: Any) -> list[ResponseStreamEvent]:
    return list(client.responses.create(**asked, stream=True))


def text_of(found: list[Any]) -> str:
    return "".join(event.delta for event in found if event.type == "response.output_text.delta")


def test_a_response_says_what_chat_says(client: OpenAI) -> None:
    told: Any = {"metadata": {"for": "me"}, "user": "u", "safety_identifier": "s"}
    told |= {"prompt_cache_key": "k", "service_tier": "flex"}
    response = client.responses.create(**GREEDY, instructions="Be brief.", input="Hello!", **told)
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
    ]
    chat = client.chat.completions.create(**GREEDY, messages=messages)
    assert response.output_text == chat.choices[0].message.content
    assert (response.status, response.object) == ("completed", "response")
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.instructions == "Be brief."
    assert {name: getattr(response, name) for name in told} == told
    assert response.temperature == 0
    assert response.completed_at is not None
    assert response.completed_at >= response.created_at
    assert client.responses.retrieve(response.id) == response
    # Which the client itself does not look at.
    Response.model_validate(response.to_dict())


def test_a_response_cut_by_its_limit_is_incomplete(client: OpenAI) -> None:
    response = client.responses.create(**GREEDY, input="Hello!", max_output_tokens=2)
    assert (response.status, response.completed_at) == ("incomplete", None)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_logprobs_are_as_in_chat(client: OpenAI) -> None:
    response = client.responses.create(
        **GREEDY, input="Hello!", include=["message.output_text.logprobs"], top_logprobs=2
    )
    chat = client.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": "Hello!"}], logprobs=True, top_logprobs=2
    )
    told = response.output[0].content[0].logprobs
    expected = chat.choices[0].logprobs
    assert expected is not None
    assert expected.content is not None
    assert [each.to_dict() for each in told] == [each.to_dict() for each in expected.content]
    again = client.responses.retrieve(response.id, include=["message.output_text.logprobs"])
    assert again == response


@pytest.mark.parametrize("options", [{}, {"include": ["message.output_text.logprobs"]}])
def test_a_stream_is_the_response_event_by_event(client: OpenAI, options: Any) -> None:
    found = events(client, **GREEDY, input="Hello!", **options)
    kinds = [event.type.removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == [
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    for event in found:
        EVENT.validate_python(event.to_dict())
    numbers = [event.sequence_number for event in found]
    assert numbers == sorted(set(numbers))
    whole: Response = found[-1].response  # type: ignore[union-attr]
    assert text_of(found) == whole.output_text != ""
    assert client.responses.retrieve(whole.id) == whole


def test_a_stream_goes_on_after_any_event(client: OpenAI) -> None:
    """Whoever has all up to some event gets exactly the others, wherever it left."""
    found = events(client, **GREEDY, input="Tell me about soup.", max_output_tokens=24)
    whole: Response = found[-1].response  # type: ignore[union-attr]
    for index, event in enumerate(found):
        rest = list(
            client.responses.retrieve(whole.id, stream=True, starting_after=event.sequence_number)
        )
        assert text_of(found[: index + 1]) + text_of(rest) == whole.output_text
        assert [each for each in rest if "delta" not in each.type] == [
            each for each in found[index + 1 :] if "delta" not in each.type
        ]


def test_the_client_goes_and_the_response_stays(client: OpenAI) -> None:
    asked = LONG | {"max_output_tokens": 200}
    stream = client.responses.create(**asked, input="Soup?", background=True, stream=True)
    seen: list[ResponseStreamEvent] = []
    for event in stream:
        seen.append(event)
        if len(seen) == 8:
            break
    stream.close()
    begun: Response = seen[0].response  # type: ignore[union-attr]
    rest = list(
        client.responses.retrieve(begun.id, stream=True, starting_after=seen[-1].sequence_number)
    )
    whole: Response = rest[-1].response  # type: ignore[union-attr]
    assert text_of(seen) + text_of(rest) == whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens == 200


def test_a_conversation_goes_on_by_the_id_of_its_last_response(client: OpenAI) -> None:
    first = client.responses.create(**GREEDY, instructions="Sing.", input="Hello!")
    second = client.responses.create(
        **GREEDY, instructions="Be brief.", input="And now?", previous_response_id=first.id
    )
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    chat = client.chat.completions.create(**GREEDY, messages=messages)
    assert second.output_text == chat.choices[0].message.content
    assert second.previous_response_id == first.id
    # Nothing of it hangs on the one before.
    client.responses.delete(first.id)
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    said = [(item.role, item.content[0].text) for item in items]  # type: ignore[index, union-attr]
    assert said == [
        ("user", "Hello!"), ("assistant", first.output_text), ("user", "And now?"),
    ]  # fmt: skip
    turns: Any = [
        *[item.model_dump() | {"phase": "final_answer"} for item in second.output],
        {"role": "user", "content": "Hm."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Please."},
    ]
    third = client.responses.create(
        **GREEDY,
        input=turns,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        text={"verbosity": "low"},
        prompt_cache_options={"mode": "implicit"},
        prompt_cache_retention="24h",
    )
    assert third.reasoning is not None
    assert third.reasoning.summary == "auto"
    found = list(client.responses.input_items.list(third.id))[:2]
    assert [item.content[0].text for item in found] == ["Please.", "No."]  # type: ignore[index, union-attr]
    assert third.status in ("completed", "incomplete")


def test_its_prompt_is_counted_without_computing(client: OpenAI) -> None:
    first = client.responses.create(**GREEDY, input="Hello!")
    asked: Any = {"instructions": "Sing.", "input": "More.", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(model=MODEL, **asked)
    assert counted.object == "response.input_tokens"
    usage = client.responses.create(**GREEDY, **asked).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens


def test_a_conversation_that_is_too_long_loses_its_oldest_turns(client: OpenAI) -> None:
    said = [
        {"role": role, "content": f"{number}: {'la ' * 90}"}
        for number in range(9)
        for role in ("user", "assistant")
    ]
    turns: Any = [{"role": "developer", "content": "Sing."}, *said, SAID]
    asked: Any = {**GREEDY, "max_output_tokens": 100}
    with pytest.raises(BadRequestError, match="context"):
        client.responses.create(**asked, input=turns)
    cut = client.responses.create(**asked, input=turns, truncation="auto")
    assert cut.truncation == "auto"
    counts = [
        client.responses.input_tokens.count(model=MODEL, input=[turns[0], *turns[start:]])
        for start in range(len(turns) - 1, 0, -2)
    ]
    assert cut.usage is not None
    assert cut.usage.input_tokens == max(
        each.input_tokens for each in counts if each.input_tokens <= 1024 - 100
    )
    # What is told of it is what was said.
    assert len(list(client.responses.input_items.list(cut.id))) == len(turns)
    with pytest.raises(BadRequestError, match="context"):
        client.responses.create(**asked, input="la " * 2000, truncation="auto")


async def test_in_the_background_it_is_queued_then_cancelled(
    async_client: AsyncOpenAI, whole_stack: WholeStack
) -> None:
    with whole_stack.held():
        response = await async_client.responses.create(**LONG, input="Hello!", background=True)
        assert response.status == "queued"
        cancelled = await async_client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert await async_client.responses.retrieve(response.id) == cancelled
    # What has ended stays as it was.
    assert await async_client.responses.cancel(response.id) == cancelled


async def test_in_the_background_it_comes_to_its_end(async_client: AsyncOpenAI) -> None:
    response = await async_client.responses.create(**GREEDY, input="Hello!", background=True)

    async def has_ended() -> bool:
        nonlocal response
        response = await async_client.responses.retrieve(response.id)
        return response.status not in ("queued", "in_progress")

    await until(has_ended, "the response has ended")
    assert response.status == "completed"
    assert response.output_text


def test_what_is_deleted_or_not_stored_is_found_by_nobody(client: OpenAI) -> None:
    stored = client.responses.create(**GREEDY, input="Hello!")
    client.responses.delete(stored.id)
    passing = client.responses.create(**GREEDY, input="Hello!", store=False)
    assert passing.output_text == stored.output_text
    live = client.responses.create(**LONG, input="Hello!", background=True)
    client.responses.delete(live.id)
    rule = r"kept for \d+ s .*, stored responses for \d+ s .*; with store: false none is"
    for gone in (stored, passing, live):
        for ask in (
            client.responses.retrieve,
            client.responses.delete,
            client.responses.cancel,
            client.responses.input_items.list,
        ):
            with pytest.raises(NotFoundError, match=f"{gone.id}.* was deleted, .*{rule}"):
                ask(gone.id)
        named = f"previous_response_id: names '{gone.id}', which is not here: .*{rule}"
        with pytest.raises(BadRequestError, match=named) as caught:
            client.responses.create(**GREEDY, input="?", previous_response_id=gone.id)
        assert caught.value.param == "previous_response_id"


def test_the_same_key_is_the_same_response_though_what_was_before_it_is_gone(
    client: OpenAI,
) -> None:
    first = client.responses.create(**GREEDY, input="Hello!", max_output_tokens=1)
    said: Any = [
        {"type": "item_reference", "id": first.output[0].id},
        {"role": "user", "content": "And?"},
    ]
    whole: dict[str, Any] = {"input": "And?", "previous_response_id": first.id}
    asks: list[Any] = [
        partial(
            client.responses.create,
            **GREEDY,
            max_output_tokens=2,
            extra_headers={"Idempotency-Key": f"on-{n}"},
            **asked,
        )
        for n, asked in enumerate((whole, {"input": said}))
    ]
    answers = [ask() for ask in asks]
    client.responses.delete(first.id)
    for ask, answer in zip(asks, answers, strict=True):
        again = ask()
        assert (again.id, again.output, again.usage) == (answer.id, answer.output, answer.usage)
        # Another body, and another key.
        with pytest.raises(ConflictError):
            ask(temperature=0.5)
        with pytest.raises(BadRequestError, match=r"names '(resp|msg)_"):
            ask(extra_headers={"Idempotency-Key": "on-2"})


def test_the_same_key_is_the_same_response(client: OpenAI) -> None:
    asked: Any = {**GREEDY, "input": "Hello!", "extra_headers": {"Idempotency-Key": "once-1"}}
    first, again = client.responses.create(**asked), client.responses.create(**asked)
    assert first == again
    assert first.id == "resp_once-1"


@pytest.mark.parametrize(
    ("field", "rule", "asked"),
    [
        ("input", "must", {"input": []}),
        (
            "input.1.content.0.type",
            "images, audio and files are not taken",
            {"input": [SAID, IMAGE]},
        ),
        ("input", "a string or a list of messages", {"input": 7}),
        ("input.0", "must be an object", {"input": [7]}),
        ("input.0.content", "a string or a list of text parts", {"input": [SAID | {"content": 7}]}),
        ("input.1.role", "is required", {"input": [SAID, {"content": "x"}]}),
        (
            "input.1.role",
            "must not be tool: what came of a call is an item of type function_call_output",
            {"input": [SAID, {"role": "tool", "content": "x"}]},
        ),
        ("input.1.name", "not a known field", {"input": [SAID, SAID | {"name": "me"}]}),
        (
            "input.1.type",
            "reasoning, item_reference; got 'web_search_call'",
            {"input": [SAID, {"type": "web_search_call", "action": "x"}]},
        ),
        ("max_output_tokens", "at least 1", {"max_output_tokens": 0}),
        ("max_output_tokens", "must be at most", {"max_output_tokens": 5000}),
        ("max_output_tokens", "must be in [1, 4294967295]", {"max_output_tokens": 10**30}),
        (
            "top_logprobs",
            "must be in [0, 20]",
            {"top_logprobs": 10**30, "include": ["message.output_text.logprobs"]},
        ),
        ("background", "needs store", {"background": True, "store": False}),
        ("top_logprobs", "needs include", {"top_logprobs": 3}),
        ("include", "message.output_text.logprobs", {"include": ["file_search_call.results"]}),
        ("metadata", "at most 16", {"metadata": {str(n): "" for n in range(17)}}),
        ("metadata", "512", {"metadata": {"a": "b" * 513}}),
        ("user", "512", {"user": "b" * 513}),
        ("truncation", "'auto' or 'disabled'", {"truncation": "some"}),
        ("max_tool_calls", "counts calls of OpenAI's own tools", {"max_tool_calls": 1}),
        (
            "input.1.id",
            "names 'msg_1', which no response",
            {"input": [SAID, {"type": "item_reference", "id": "msg_1"}]},
        ),
        ("text", "must be an object", {"text": "loud"}),
        ("text.verbosity", "'low', 'medium' or 'high'", {"text": {"verbosity": "loud"}}),
        ("tools.0.type", "should be", {"tools": [{"type": "web_search"}]}),
        ("conversation", "must match conv_", {"conversation": "conv_1"}),
        ("conversation", "must be the id of a conversation", {"conversation": {"name": "c"}}),
        ("previous_response_id", "must match resp_", {"previous_response_id": "chatcmpl-1"}),
        ("text.format", "is required", {"text": {"format": {"type": "json_schema"}}}),
        ("text.format.type", "'json_schema'", {"text": {"format": {"type": "grammar"}}}),
        ("temperature", "2", {"temperature": 3.0}),
        *(
            (name, f"{name}: is not a known field; {hint}", {"extra_body": {name: value}})
            for name, value, hint in (
                ("max_tokens", 5, "here it is max_output_tokens"),
                ("max_completion_tokens", 5, "here it is max_output_tokens"),
                ("response_format", {"type": "text"}, "here it is text.format"),
                ("messages", [SAID], "here it is input"),
                ("logprobs", True, "here it is include, with 'message.output_text.logprobs'"),
                ("n", 2, "a response has one answer"),
            )
        ),
        ("prompt_cache_options.prewarm", "False", {"prompt_cache_options": {"prewarm": True}}),
    ],
)
def test_what_is_wrong_is_named(client: OpenAI, field: str, rule: str, asked: Any) -> None:
    body = {"model": MODEL, "input": "Hello!", **asked}
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**body)
    assert str(caught.value.param).startswith(field)
    assert rule in str(caught.value)


def test_numbers_of_any_size_may_stand_in_schemas(client: OpenAI) -> None:
    """Which are kept with the response, and told again."""
    schema: Any = {"type": "object", "maxProperties": 2**64, "examples": [2**64 - 1, -(10**400)]}
    tool: Any = {"type": "function", "name": "f", "strict": None, "parameters": schema}
    form: Any = {"type": "json_schema", "name": "n", "schema": {"enum": [2**70]}}
    response = client.responses.create(
        **GREEDY,
        input="Hello!",
        max_output_tokens=1,
        tools=[tool],
        tool_choice="none",
        text={"format": form},
    )
    told: Any = client.responses.retrieve(response.id)
    assert told == response
    assert told.text.format.schema_ == {"enum": [2**70]}
    told_again = told.tools[0].parameters
    assert told_again == schema | {"examples": [2**64 - 1, -sys.float_info.max]}


def test_an_output_longer_than_the_context_has_openais_code(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.responses.create(**GREEDY, input="Hello!", max_output_tokens=5000)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("query", [{"stream": "True"}, {"stream": "maybe"}])
def test_a_query_that_says_nothing_is_refused(client: OpenAI, query: dict[str, str]) -> None:
    response = client.responses.create(**GREEDY, input="Hello!", max_output_tokens=1)
    with pytest.raises(BadRequestError, match="stream: must be true or false, got '"):
        client.responses.retrieve(response.id, extra_query=query)
    with pytest.raises(BadRequestError, match=r"include: 'message.* was not asked for with the"):
        client.responses.retrieve(response.id, include=["message.output_text.logprobs"])
    with pytest.raises(BadRequestError, match=r"include: must be of .*, got 'all'"):
        client.responses.retrieve(response.id, extra_query={"include": "all"})
    with pytest.raises(BadRequestError, match="order: must be asc or desc, got 'up'"):
        client.responses.input_items.list(response.id, extra_query={"order": "up"})
    with pytest.raises(BadRequestError, match=r"include: 'message.* is not kept with items"):
        client.responses.input_items.list(response.id, include=["message.output_text.logprobs"])


@pytest.mark.parametrize("after", ["x", "-1", "99999999999"])
def test_a_number_that_is_none_is_refused(client: OpenAI, after: Any) -> None:
    response = client.responses.create(**GREEDY, input="Hello!", max_output_tokens=1)
    with pytest.raises(BadRequestError, match="starting_after: must be the sequence_number"):
        client.responses.retrieve(response.id, stream=True, starting_after=after)


def test_nobody_elses_response_is_found(another_door: Callable[..., Door], tmp_path: Path) -> None:
    names = ("alice", "bob")
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[tenants.{name}]\nkeys = ["sha256:{hashlib.sha256(name.encode()).hexdigest()}"]\n'
            for name in names
        )
    )
    door = another_door(api_keys_file=keys)
    alice, bob = (
        OpenAI(base_url=door.openai, api_key=name, max_retries=0, timeout=60) for name in names
    )
    with alice, bob:
        response = alice.responses.create(**GREEDY, input="Hello!")
        assert alice.responses.retrieve(response.id) == response
        for ask in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
            with pytest.raises(NotFoundError):
                ask(response.id)
        with pytest.raises(BadRequestError, match="which is not here"):
            bob.responses.create(**GREEDY, input="?", previous_response_id=response.id)
