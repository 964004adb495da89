"""The same calls and reasoning, as gRPC clients get them."""

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from kaiten.client import AsyncClient
from tests.support.gateway_stack import MODEL, running_gateway, text_of, until
from tests.support.tool_models import (
    ASK,
    PARIS,
    SPOKEN,
    TOOLS,
    called,
    prompt_of,
    speaking,
)


async def test_grpc_clients_get_the_text_as_the_model_wrote_it(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """And may tell of tools, calls and their answers; the marks of calls are in the text."""
    turns = [
        {"role": "user", "content": "Time?"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "abcdefghi", "name": "clock", "arguments": '{"z": 1}'}],
        },
        {"role": "tool", "content": "12:00", "tool_call_id": "abcdefghi"},
    ]
    tools = [{"name": "clock", "description": "The time."}]
    async with speaking("mistral_v3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["mistral_v3"])
        events = await stack.generate(conversation={"messages": turns, "tools": tools})
        assert text_of(events) == SPOKEN["mistral_v3"]
        prompt = prompt_of(stack)
        assert (
            '[TOOL_CALLS] [{"name": "clock", "arguments": {"z": 1}, "id": "abcdefghi"}]' in prompt
        )
        assert "The time." in prompt
        # Without tools such a mark is what it was: no text.
        plain = await stack.generate(conversation={"messages": [{"role": "user", "content": "a"}]})
        assert text_of(plain) == SPOKEN["mistral_v3"].replace("[TOOL_CALLS]", "")


GRPC_TOOLS: list[Any] = [
    {
        "name": each["function"]["name"],
        "parameters": json.dumps(each["function"].get("parameters", {"type": "object"})),
    }
    for each in TOOLS
]
TURNS: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]


def conversation(**more: Any) -> Any:
    return {"messages": TURNS, "tools": GRPC_TOOLS} | more


@pytest.mark.parametrize("family", SPOKEN)
async def test_grpc_clients_get_the_same_calls(
    family: str, tmp_path: Path, redis_url: str, cell: str
) -> None:
    """As over HTTP, of one output; and the same again from any position, at another gateway."""
    async with speaking(family, tmp_path, redis_url, cell, tokens_per_step=3) as stack:
        stack.says(SPOKEN[family])
        chat = stack.gateway.openai.chat.completions
        http = await chat.create(
            model=MODEL,
            messages=ASK,
            tools=TOOLS,
            extra_headers={"idempotency-key": "same"},
        )
        message: Any = http.choices[0].message
        address = f"127.0.0.1:{stack.gateway.service.grpc_port}"
        async with (
            AsyncClient(address) as client,
            running_gateway(tmp_path / family, redis_url, cell) as other,
            AsyncClient(f"127.0.0.1:{other.service.grpc_port}") as elsewhere,
        ):
            await until(lambda: not other.service.generation_service.readiness.problem, "readiness")
            asked: Any = {"messages": TURNS, "tools": GRPC_TOOLS, "request_id": "mine"}
            told = await client.complete(**asked)
            (choice,) = told.choices
            assert [(each.name, each.arguments) for each in choice.tool_calls] == called(message)
            assert (choice.text, choice.reasoning) == (
                message.content or "",
                getattr(message, "reasoning_content", ""),
            )
            # Ids follow from the request's.
            same = await client.wait("same")
            assert [each.id for each in same.tool_calls] == [each.id for each in message.tool_calls]
            details: Any = http.usage and http.usage.completion_tokens_details
            assert same.usage.reasoning_tokens == details.reasoning_tokens
            assert (same.usage.reasoning_tokens > 0) == (family == "qwen3")

            async with client.attach("mine") as generation:
                deltas = [delta async for delta in generation]
            for count in range(1, len(deltas), 3):
                end = deltas[count - 1].position + deltas[count - 1].token_count
                async with elsewhere.attach("mine", positions=[end]) as generation:
                    both = [*deltas[:count], *[delta async for delta in generation]]
                parts = [part for delta in both for part in delta.tool_calls]
                arguments = ["".join(p.arguments for p in parts if p.index == i) for i in range(2)]
                assert arguments == [each.arguments for each in choice.tool_calls]
                assert [p.name for p in parts if p.id] == [e.name for e in choice.tool_calls]
                assert "".join(delta.text for delta in both) == choice.text
                assert "".join(delta.reasoning for delta in both) == choice.reasoning


async def test_grpc_clients_choose_tools(tmp_path: Path, redis_url: str, cell: str) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["qwen3"])
        address = f"127.0.0.1:{stack.gateway.service.grpc_port}"
        async with AsyncClient(address) as client:
            asked: Any = {"messages": TURNS, "tools": TOOLS}
            none = await client.complete(**asked, tool_choice="none")
            assert "<tool_call>" in none.text
            assert "get_weather" not in prompt_of(stack)
            await client.complete(**asked, tool_choice={"name": "clock"})
            grammar = stack.scheduler.submits[-1].sampling.grammar
            assert "clock" in grammar
            assert "get_weather" not in grammar
            for mode in ("auto", "required"):
                chat = {"mode": mode, "tools": [{"function": {"name": "clock"}}]}
                for only in ({"mode": mode, "tools": ["clock"]}, {"allowed_tools": chat}):
                    await client.complete(**asked, tool_choice=only)
                    grammar = stack.scheduler.submits[-1].sampling.grammar
                    assert ("clock" in grammar, "get_weather" in grammar) == (True, False)
                    assert ("TEXT" in grammar) is (mode == "auto")
                    assert "get_weather" in prompt_of(stack)
            # Nothing is left to be kept to.
            await client.complete(**asked, tool_choice={"tools": ["clock", "get_weather"]})
            assert not stack.scheduler.submits[-1].sampling.grammar
            # What was called, as a turn of a conversation that goes on.
            one = await client.complete(**asked, parallel_tool_calls=False)
            assert [call.name for call in one.tool_calls] == ["get_weather"]
            assert one.choices[0].finish_reason == "stop"
            answer = {"role": "tool", "content": "{}", "tool_call_id": one.tool_calls[0].id}
            asked["messages"] = [*TURNS, one.choices[0].message, answer]
            await client.complete(**asked)
            assert f'"arguments": {PARIS}}}\n</tool_call>' in prompt_of(stack)
        for wrong, rule in (
            ({"tool_choice": {"mode": 3}}, "conversation.tool_choice: needs parse_output"),
            ({"parallel_tool_calls": False}, "parallel_tool_calls: needs parse_output"),
            ({"tools": [GRPC_TOOLS[1] | {"strict": True}]}, "strict: needs parse_output"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=rule):
                await stack.generate(conversation=conversation(**wrong))
        for choice, rule in (
            ({"mode": 9}, "must be a known mode"),
            ({"name": "rm"}, "tool_choice: must name one of tools"),
            ({"allowed_names": ["clock", "rm"]}, "allowed_names: must name one of tools, got 'rm'"),
            ({"name": "clock", "allowed_names": ["clock"]}, "is for the modes AUTO and REQUIRED"),
            ({"mode": 2, "allowed_names": ["clock"]}, "is for the modes AUTO and REQUIRED"),
        ):
            asked = conversation(tool_choice=choice)
            with pytest.raises(grpc.aio.AioRpcError, match=rule):
                await stack.generate(conversation=asked, parse_output=True)
