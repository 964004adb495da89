"""Tools and reasoning by the OpenAI package, with published templates."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI, BadRequestError
from tokenizers import AddedToken

from tests.support.gateway_stack import MODEL, Stack, running_stack
from tests.support.tokenizers import byte_level_bpe, write_model_folder

TEMPLATES: Final = Path(__file__).parents[1] / "parity/templates"
# Control tokens, as their checkpoints have them: texts do not show them.
CONTROL: Final = ("[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<|eom_id|>")
WEATHER: Final[Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a city </s>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
NOW: Final[Any] = {"type": "function", "function": {"name": "now", "parameters": {}}}
TOOLS: Final = [WEATHER, NOW]
USER: Final[list[Any]] = [{"role": "user", "content": "How is it in Rome?"}]
ARGUMENTS: Final = '{"city": "Rome"}'
# Template, what the model writes, and its content.
FAMILIES: Final = [
    (
        "qwen2_5",
        f'Let me look.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
        "Let me look.",
    ),
    ("mistral_v3", f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUMENTS}}}]', None),
    ("mistral_v7", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}", None),
    ("llama3_1", f'{{"name": "weather", "parameters": {ARGUMENTS}}}<|eom_id|>', None),
    (
        "phi4_mini",
        f'<|tool_call|>[{{"name": "weather", "arguments": {ARGUMENTS}}}]<|/tool_call|>',
        None,
    ),
]


@asynccontextmanager
async def stack_of(
    template: str, tmp_path: Path, redis_url: str, cell: str
) -> AsyncIterator[Stack]:
    tokenizer = byte_level_bpe().from_str(byte_level_bpe().to_str())
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in CONTROL])
    folder = write_model_folder(
        tmp_path / "model",
        tokenizer,
        config={"max_position_embeddings": 4096},
        chat_template=(TEMPLATES / f"{template}.jinja").read_text(),
    )
    async with running_stack(folder, redis_url, cell, context_tokens=4096) as running:
        yield running


@pytest.fixture
async def stack(tmp_path: Path, redis_url: str, cell: str) -> AsyncIterator[Stack]:
    async with stack_of("qwen3", tmp_path, redis_url, cell) as running:
        yield running


def prompt_of(stack: Stack) -> str:
    """As it was computed last."""
    ids = stack.scheduler.submits[-1].prompt_token_ids
    return str(stack.gateway.card.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.mark.parametrize(("template", "text", "content"), FAMILIES)
async def test_a_turn_with_a_call_and_its_answer(
    tmp_path: Path, redis_url: str, cell: str, template: str, text: str, content: str | None
) -> None:
    async with stack_of(template, tmp_path, redis_url, cell) as stack:
        client: AsyncOpenAI = stack.gateway.openai
        stack.says(text)
        reply = await client.chat.completions.create(model=MODEL, messages=USER, tools=TOOLS)
        (choice,) = reply.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", content)
        calls: list[Any] = choice.message.tool_calls or []
        (call,) = calls
        assert call.type == "function"
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert '"weather"' in prompt_of(stack)
        assert "Of a city </s>" in prompt_of(stack)
        ends = stack.gateway.card.tokenizer.token_to_id("</s>")
        # A control token in a description stays text.
        assert ends not in list(stack.scheduler.submits[-1].prompt_token_ids)

        async with client.chat.completions.stream(
            model=MODEL, messages=USER, tools=TOOLS
        ) as stream:
            final = await stream.get_final_completion()
        streamed = final.choices[0]
        assert (streamed.finish_reason, streamed.message.content or None) == ("tool_calls", content)
        told: list[Any] = streamed.message.tool_calls or []
        (same,) = told
        assert same.function.arguments == ARGUMENTS

        stack.says("Sunny.")
        answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "22 degrees"}
        turns: list[Any] = [*USER, choice.message.model_dump(exclude_none=True), answer]
        said = await client.chat.completions.create(model=MODEL, messages=turns, tools=TOOLS)
        assert said.choices[0].message.content == "Sunny."
        assert said.choices[0].finish_reason == "stop"
        assert "22 degrees" in prompt_of(stack)
        assert "Rome" in prompt_of(stack).partition("22 degrees")[0].rpartition("weather")[2]


async def test_several_calls_and_reasoning(stack: Stack) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    stack.says(f"<think>\nTwice, then.\n</think>\n\n{call}\n{call}")
    create = stack.gateway.openai.chat.completions.create
    reply = await create(model=MODEL, messages=USER, tools=TOOLS)
    message: Any = reply.choices[0].message
    assert message.reasoning_content == "Twice, then."
    assert message.content is None
    ids = [each.id for each in message.tool_calls]
    assert len(set(ids)) == 2
    stream = await create(model=MODEL, messages=USER, tools=TOOLS, stream=True)
    deltas: list[Any] = [chunk.choices[0].delta async for chunk in stream if chunk.choices]
    calls = [each for delta in deltas for each in delta.tool_calls or ()]
    assert [(each.index, each.function.name) for each in calls] == [(0, "now"), (1, "now")]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert (thoughts, "".join(delta.content or "" for delta in deltas)) == ("Twice, then.", "")


async def test_reasoning_that_the_template_opened(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with stack_of("deepseek_r1", tmp_path, redis_url, cell) as stack:
        stack.says("I wonder.\n</think>\n\nYes.")
        reply = await stack.gateway.openai.chat.completions.create(model=MODEL, messages=USER)
    message: Any = reply.choices[0].message
    assert (message.reasoning_content, message.content) == ("I wonder.", "Yes.")


async def test_what_is_no_call_is_content_and_without_tools_nothing_is_a_call(
    stack: Stack,
) -> None:
    create = stack.gateway.openai.chat.completions.create
    for text in ('<tool_call>{"name": broken}</tool_call> so', "<tool_call>\n{"):
        stack.says(text)
        reply = await create(model=MODEL, messages=USER, tools=TOOLS)
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (text, "stop")
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    stack.says(text)
    for given in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        plain = await create(model=MODEL, messages=USER, **given)  # type: ignore[call-overload]
        assert plain.choices[0].message.content == text
        assert plain.choices[0].message.tool_calls is None
        assert "weather" not in prompt_of(stack)


async def test_one_call_at_most(stack: Stack) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    stack.says(f"{call}\n{call}")
    reply = await stack.gateway.openai.chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, parallel_tool_calls=False
    )
    assert len(reply.choices[0].message.tool_calls or ()) == 1
    assert reply.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("choice", "allowed"),
    [
        ("required", {"weather", "now"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
async def test_a_choice_is_kept_to_by_a_grammar(
    stack: Stack, choice: Any, allowed: set[str]
) -> None:
    stack.says('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    reply = await stack.gateway.openai.chat.completions.create(
        model=MODEL, messages=USER, tools=TOOLS, tool_choice=choice
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    grammar = stack.scheduler.submits[-1].sampling.grammar
    assert {name for name in ("weather", "now") if name in grammar} == allowed


WRITTEN: Final = "messages.1.tool_calls.0.function.arguments"


def with_call(arguments: str) -> list[Any]:
    function = {"name": "now", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return [*USER, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("asked", "field", "rule"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name", "'weather' is of two"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools.0.function.name",
            "must match",
        ),
        ({"tools": [NOW] * 129}, "tools", "at most 128 tools, got 129"),
        ({"tool_choice": "required"}, "tool_choice", "must be auto or none without tools"),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "b"}}},
            "tool_choice",
            "must name one of the tools, got 'b'",
        ),
        (
            {"messages": with_call("[1]")},
            "messages.1.tool_calls.0.function.arguments",
            "JSON object",
        ),
        ({"messages": with_call("{")}, "messages.1.tool_calls.0.function.arguments", "JSON object"),
        (
            {
                "tools": [NOW],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice",
            "together with response_format",
        ),
        (
            {
                "tools": [
                    {"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}
                ],
                "tool_choice": "required",
            },
            "tools",
            "Invalid type: x",
        ),
    ],
)
async def test_what_is_wrong_is_named(stack: Stack, asked: Any, field: str, rule: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        await stack.gateway.openai.chat.completions.create(
            **{"model": MODEL, "messages": USER, **asked}
        )
    assert (caught.value.param, rule in str(caught.value)) == (field, True), str(caught.value)
    assert stack.scheduler.submits == []


async def test_a_model_that_knows_none_refuses_them(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with stack_of("chatml", tmp_path, redis_url, cell) as stack:
        with pytest.raises(BadRequestError, match="chat template knows no tools") as caught:
            await stack.gateway.openai.chat.completions.create(
                model=MODEL, messages=USER, tools=TOOLS
            )
    assert caught.value.param == "tools"
