"""Tool calls and reasoning as items of /v1/responses."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.gateway_stack import MODEL, WAIT_S, running_gateway, until
from tests.support.tool_models import (
    PARIS,
    SPOKEN,
    TOOLS,
    prompt_of,
    speaking,
)

RESPONSE_TOOLS: list[Any] = [{"type": "function"} | each["function"] for each in TOOLS]
SAID = f'{SPOKEN["qwen3"]}\nDone, "é 日本".'


def shape(item: Any) -> tuple[str, str]:
    """What an item is and says."""
    if item.type == "function_call":
        return item.name, item.arguments
    return item.type, "".join(part.text for part in item.content)


SHAPES = [
    ("reasoning", "Hm."),
    ("message", "I see."),
    ("get_weather", PARIS),
    ("clock", "{}"),
    ("message", 'Done, "é 日本".'),
]


async def test_responses_have_items_of_each_kind(tmp_path: Path, redis_url: str, cell: str) -> None:
    """Whole, streamed, told again, and by the package's own helper: the same."""
    async with speaking("qwen3", tmp_path, redis_url, cell, tokens_per_step=2) as stack:
        stack.says(SAID)
        responses = stack.gateway.openai.responses
        asked: dict[str, Any] = {"model": MODEL, "input": "Weather?", "tools": RESPONSE_TOOLS}
        whole = await responses.create(**asked)
        assert [shape(item) for item in whole.output] == SHAPES
        assert whole.status == "completed"
        assert {item.status for item in whole.output} == {"completed"}
        assert [tool.name for tool in whole.tools] == ["get_weather", "clock"]
        assert len({item.id for item in whole.output}) == 5
        assert await responses.retrieve(whole.id) == whole

        async with responses.stream(**asked) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert [shape(item) for item in final.output] == SHAPES
        numbers = [event.sequence_number for event in events]
        assert numbers == sorted({*numbers})
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:2] == ["created", "in_progress"]
        assert kinds.count("output_item.added") == kinds.count("output_item.done") == 5
        assert kinds.count("function_call_arguments.done") == 2
        assert kinds.count("function_call_arguments.delta") > 2


def folded(events: list[Any]) -> list[tuple[str, str]]:
    """Deltas of one item put together; all other events by their kind."""
    found: list[tuple[str, str]] = []
    for event in events:
        kind = event.type
        text = event.delta if kind.endswith(".delta") else ""
        if text and found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + text
        else:
            found.append((kind, text))
    return found


async def test_a_stream_of_items_goes_on_after_any_event_at_another_gateway(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """However its tokens come together there."""
    async with speaking("qwen3", tmp_path, redis_url, cell, tokens_per_step=4) as stack:
        stack.says(SAID)
        responses = stack.gateway.openai.responses
        events = [
            event
            async for event in await responses.create(
                model=MODEL, input="Weather?", tools=RESPONSE_TOOLS, stream=True
            )
        ]
        whole: Any = events[-1]
        async with running_gateway(tmp_path / "qwen3", redis_url, cell) as other:
            await until(lambda: not other.service.generation_service.readiness.problem, "readiness")
            assert await other.openai.responses.retrieve(whole.response.id) == whole.response
            for index in range(0, len(events), 5):
                after = events[index].sequence_number
                stream = await other.openai.responses.retrieve(
                    whole.response.id, stream=True, starting_after=after
                )
                rest = [event async for event in stream]
                assert folded([*events[: index + 1], *rest]) == folded(events)


async def test_a_conversation_of_responses_goes_on_with_what_came_of_its_calls(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["qwen3"])
        responses = stack.gateway.openai.responses
        first = await responses.create(model=MODEL, input="Weather?", tools=RESPONSE_TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        outputs: list[Any] = [
            {"type": "function_call_output", "call_id": call.call_id, "output": f"so {number}"}
            for number, call in enumerate(calls)
        ]
        stack.says("It is clear.")
        by_id = await responses.create(
            model=MODEL, previous_response_id=first.id, input=outputs, tools=RESPONSE_TOOLS
        )
        said: list[Any] = [{"role": "user", "content": "Weather?"}]
        said += [item.model_dump(exclude_none=True) for item in first.output]
        in_full = await responses.create(model=MODEL, input=[*said, *outputs], tools=RESPONSE_TOOLS)
        assert by_id.output_text == in_full.output_text == "It is clear."
        # As the package's types have it, with every field that they know and nobody has said.
        whole: list[Any] = [said[0], *(item.model_dump() for item in first.output)]
        assert None in whole[-1].values()
        asked: dict[str, Any] = {
            "model": MODEL,
            "input": [*whole, *outputs],
            "tools": RESPONSE_TOOLS,
        }
        nothing = dict.fromkeys(("prompt", "context_management", "moderation", "image"))
        await responses.create(**asked, extra_body=nothing)
        # By the ids of its items alone, as JavaScript frameworks do.
        named: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        await responses.create(**asked | {"input": [said[0], *named, *outputs]})
        # The model was told the same every way, and in its own way.
        assert prompt_of(stack, -1) == prompt_of(stack, -2) == prompt_of(stack, -3)
        assert prompt_of(stack, -4) == prompt_of(stack, -1)
        assert f'"arguments": {PARIS}}}\n</tool_call>' in prompt_of(stack)
        assert "<tool_response>\nso 1\n</tool_response>" in prompt_of(stack)
        items = [item async for item in responses.input_items.list(by_id.id, order="asc")]
        assert [item.type for item in items] == [
            "message",
            "reasoning",
            "message",
            "function_call",
            "function_call",
            "function_call_output",
            "function_call_output",
        ]


@pytest.mark.parametrize("family", ["qwen3", "mistral_v3"])
async def test_a_conversation_goes_on_behind_a_call_that_was_broken_off(
    family: str, tmp_path: Path, redis_url: str, cell: str
) -> None:
    """By the end of its tokens, or by a stop string: nobody could have made it."""
    said = SPOKEN[family]
    async with speaking(family, tmp_path, redis_url, cell) as stack:
        openai = stack.gateway.openai
        count = len(stack.gateway.ids(said[: said.index("Paris") + 3]))
        only_call = said[said.index("<tool_call>" if family == "qwen3" else "[TOOL_CALLS]") :]
        cut: list[tuple[str, dict[str, Any], str]] = [
            (said, {"max_output_tokens": count}, "incomplete"),
            (said, {"extra_body": {"stop": "aris"}}, "completed"),
            (only_call, {"extra_body": {"stop": "aris"}}, "completed"),
        ]
        for text, how, status in cut:
            talk = await openai.conversations.create()
            stack.says(text)
            asked: dict[str, Any] = {"model": MODEL, "tools": RESPONSE_TOOLS}
            first = await openai.responses.create(
                **asked, input="Weather?", conversation=talk.id, **how
            )
            *before, call = first.output
            assert call.type == "function_call"
            assert PARIS.startswith(call.arguments)
            assert (first.status, call.status) == (status, "incomplete")
            stack.says("Hm.")
            for of in ({"previous_response_id": first.id}, {"conversation": talk.id}):
                again = await openai.responses.create(**asked, **of, input="And now?")
                assert again.output_text == "Hm."
                prompt = prompt_of(stack)
                # Not what the tools say of themselves.
                assert '"city": "P' not in prompt
                assert ("I see." in prompt) is bool(before)
                assert prompt.index("Weather?") < prompt.index("And now?")


async def test_of_more_turns_than_a_prompt_may_have_as_many_are_left_as_fit(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    said = [{"role": role, "content": "x"} for _ in range(2100) for role in ("user", "assistant")]
    asked = {"input": [*said, {"role": "user", "content": "Weather?"}]}
    async with (
        speaking("qwen3", tmp_path, redis_url, cell) as stack,
        httpx.AsyncClient(base_url=stack.gateway.http_url, timeout=WAIT_S) as http,
    ):
        url = "/v1/responses/input_tokens"
        refused = await http.post(url, json=asked)
        assert (
            refused.json()["error"]["message"] == "input: must have at most 4096 messages, got 4201"
        )
        counted = await http.post(url, json={**asked, "truncation": "auto"})
        assert 4000 < counted.json()["input_tokens"] < 4096


async def test_reasoning_that_was_broken_off_is_a_turn(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("deepseek_r1", tmp_path, redis_url, cell) as stack:
        stack.says("Hm, and so on")
        responses = stack.gateway.openai.responses
        first = await responses.create(model=MODEL, input="Weather?", max_output_tokens=2)
        assert [item.type for item in first.output] == ["reasoning"]
        stack.says("So.</think>Clear.")
        again = await responses.create(model=MODEL, input="And?", previous_response_id=first.id)
        assert again.output_text == "Clear."
        assert "None" not in prompt_of(stack)


async def test_wrong_tools_of_responses_are_named_as_its_body_has_them(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        call = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "["}
        said = {"role": "user", "content": "Weather?"}
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
            ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
            ({"tools": [RESPONSE_TOOLS[1]] * 2}, "tools.1.name"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"input": [call]}, "input.0.arguments"),
            ({"input": [said, call | {"name": "a b"}]}, "input.1.name"),
            ({"input": [{"type": "item_reference", "id": "msg_x_1"}]}, "input.0.id"),
        ]
        for fields, param in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await stack.gateway.openai.responses.create(
                    **({"model": MODEL, "input": "x"} | fields)
                )
            assert caught.value.param == param, fields
