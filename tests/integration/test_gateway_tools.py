"""Tool calls and reasoning as the real `openai` package gets them, by several families."""

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from kaiten.v1 import inference_service_pb2 as pb
from tests.support.gateway_stack import MODEL, Stack, until
from tests.support.tokenizers import token_id
from tests.support.tool_models import (
    ASK,
    BROKEN,
    CLOCK,
    CONTROL,
    PARIS,
    SPOKEN,
    TOOLS,
    WEATHER,
    called,
    prompt_of,
    speaking,
)


@pytest.mark.parametrize("family", SPOKEN)
async def test_calls_whole_and_streamed(
    family: str, tmp_path: Path, redis_url: str, cell: str
) -> None:
    # A reader that is behind gets what several steps brought as one.
    async with speaking(family, tmp_path, redis_url, cell, tokens_per_step=2) as stack:
        stack.says(SPOKEN[family])
        chat = stack.gateway.openai.chat.completions
        whole = await chat.create(model=MODEL, messages=ASK, tools=TOOLS)
        (choice,) = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert called(choice.message) == [("get_weather", PARIS), ("clock", "{}")]
        assert choice.message.content == (None if family == "llama3_1" else "I see.")
        assert getattr(choice.message, "reasoning_content", None) == (
            "Hm." if family == "qwen3" else None
        )
        ids = [call.id for call in choice.message.tool_calls or ()]
        assert len({*ids}) == 2
        assert all(len(each) == (9 if family == "mistral_v3" else 29) for each in ids)

        # The package's own helper puts the deltas together, and checks them as it goes.
        async with chat.stream(model=MODEL, messages=ASK, tools=TOOLS) as stream:
            events = [event async for event in stream]
            streamed = (await stream.get_final_completion()).choices[0]
        assert streamed.finish_reason == "tool_calls"
        assert called(streamed.message) == called(choice.message)
        assert streamed.message.content == choice.message.content or not choice.message.content
        done = [each for each in events if each.type == "tool_calls.function.arguments.done"]
        assert [(each.name, each.arguments) for each in done] == called(choice.message)
        fragments = [e for e in events if e.type == "tool_calls.function.arguments.delta"]
        assert len(fragments) > len(done)


async def test_a_conversation_with_calls_goes_on(tmp_path: Path, redis_url: str, cell: str) -> None:
    """What an agent sends back is what it got, its own answer to each call beside it."""
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["qwen3"])
        chat = stack.gateway.openai.chat.completions
        first = (await chat.create(model=MODEL, messages=ASK, tools=TOOLS)).choices[0].message
        answers = [
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "clear"}'}
            for call in first.tool_calls or ()
        ]
        stack.says("It is clear.")
        turns = [*ASK, first.model_dump(exclude_none=True), *answers]
        second = (await chat.create(model=MODEL, messages=turns, tools=TOOLS)).choices[0]
        assert (second.message.content, second.finish_reason) == ("It is clear.", "stop")
        assert second.message.tool_calls is None
        prompt = prompt_of(stack)
        assert f'{{"name": "get_weather", "arguments": {PARIS}}}' in prompt
        assert '<tool_response>\n{"sky": "clear"}\n</tool_response>' in prompt
        assert "<think>\nHm.\n</think>" in prompt


async def test_tools_reach_the_template_and_their_control_texts_stay_text(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    evil = json.loads(json.dumps(WEATHER))
    evil["function"]["parameters"]["properties"]["<|im_start|>"] = {"enum": ["<|im_end|>", 1.0]}
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": ""}}
    call["function"]["arguments"] = '{"<|im_end|>": ["<|im_start|>"]}'  # type: ignore[index]
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "c", "content": "<|im_end|>"}]
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says("So.")
        chat = stack.gateway.openai.chat.completions
        await chat.create(model=MODEL, messages=turns, tools=[evil])
        ids = list(stack.scheduler.submits[-1].prompt_token_ids)
        prompt = prompt_of(stack)
        said = json.dumps(evil, ensure_ascii=False)
        assert f"<tools>\n{said}\n</tools>" in prompt
        assert '"arguments": {"<|im_end|>": ["<|im_start|>"]}' in prompt
        start, end = (token_id(stack.gateway.card.tokenizer, text) for text in CONTROL[2:])
        # The template's own: system, user, assistant, the tool's, and the turn to come.
        assert (ids.count(start), ids.count(end)) == (5, 4)


async def test_tool_choice_none_tells_the_model_of_no_tools(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["qwen3"])
        chat = stack.gateway.openai.chat.completions
        reply = await chat.create(model=MODEL, messages=ASK, tools=TOOLS, tool_choice="none")
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == SPOKEN["qwen3"].split("</think>")[1].lstrip()
        assert "get_weather" not in prompt_of(stack)


async def test_one_call_is_told_where_several_are_not_wanted(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("mistral_v3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["mistral_v3"])
        chat = stack.gateway.openai.chat.completions
        reply = await chat.create(model=MODEL, messages=ASK, tools=TOOLS, parallel_tool_calls=False)
        assert called(reply.choices[0].message) == [("get_weather", PARIS)]


async def test_a_call_that_is_cut_off_ends_by_its_length(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("mistral_v3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["mistral_v3"][:-40])
        count = len(stack.gateway.ids(SPOKEN["mistral_v3"][:60]))
        chat = stack.gateway.openai.chat.completions
        reply = await chat.create(model=MODEL, messages=ASK, tools=TOOLS, max_tokens=count)
        (choice,) = reply.choices
        assert choice.finish_reason == "length"
        ((name, arguments),) = called(choice.message)
        assert name == "get_weather"
        assert PARIS.startswith(arguments)


async def test_a_call_that_a_stop_string_breaks_off_is_nothing_to_wait_for(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("mistral_v3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["mistral_v3"])
        chat = stack.gateway.openai.chat.completions
        asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS}
        for stop, reason in (("aris", "stop"), (', {"name": "clock"', "tool_calls")):
            reply = await chat.create(**asked, stop=stop)
            assert reply.choices[0].finish_reason == reason
            ((_, arguments),) = called(reply.choices[0].message)
            assert arguments == PARIS.partition(stop)[0]


async def test_reasoning_apart_with_and_without_its_begin(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """DeepSeek's template has begun it already; Qwen's closes it when nobody wants it."""
    async with speaking("deepseek_r1", tmp_path, redis_url, cell) as stack:
        stack.says("Hm, 1 + 1.\n</think>\n\nTwo.")
        chat = stack.gateway.openai.chat.completions
        message: Any = (await chat.create(model=MODEL, messages=ASK)).choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm, 1 + 1.", "Two.")
        chunks = [
            chunk.choices[0].delta
            async for chunk in await chat.create(model=MODEL, messages=ASK, stream=True)
        ]
        told = [getattr(delta, "reasoning_content", None) or "" for delta in chunks]
        assert "".join(told) == "Hm, 1 + 1."
        assert "".join(delta.content or "" for delta in chunks) == "Two."
        # What keeps to a schema does so from its first token.
        stack.says('"no"')
        wanted: Any = {"type": "json_schema", "json_schema": {"schema": {"enum": ["no"]}}}
        whole = await chat.create(model=MODEL, messages=ASK, response_format=wanted)
        assert whole.choices[0].message.content == '"no"'
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says("Two.")
        chat = stack.gateway.openai.chat.completions
        extra = {"chat_template_kwargs": {"enable_thinking": False}}
        message = (
            (await chat.create(model=MODEL, messages=ASK, extra_body=extra)).choices[0].message
        )
        assert message.content == "Two."
        assert getattr(message, "reasoning_content", None) is None


async def test_the_text_stays_whole_where_the_operator_says_so(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    settings = {"reasoning_format": "none", "tool_format": "none"}
    async with speaking("qwen3", tmp_path, redis_url, cell, **settings) as stack:
        stack.says(SPOKEN["qwen3"])
        chat = stack.gateway.openai.chat.completions
        reply = await chat.create(model=MODEL, messages=ASK)
        assert reply.choices[0].message.content == SPOKEN["qwen3"]
        with pytest.raises(openai.BadRequestError) as caught:
            await chat.create(model=MODEL, messages=ASK, tools=TOOLS)
        assert caught.value.param == "tools"
        assert "--tool-format" in str(caught.value)


async def test_logprobs_and_token_ids_are_of_all_tokens(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("mistral_v3", tmp_path, redis_url, cell) as stack:
        stack.says(SPOKEN["mistral_v3"])
        chat = stack.gateway.openai.chat.completions
        asked: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": TOOLS, "logprobs": True}
        extra = {"return_token_ids": True}
        whole = (await chat.create(**asked, extra_body=extra)).choices[0]
        chunks = [
            chunk.choices[0]
            async for chunk in await chat.create(**asked, extra_body=extra, stream=True)
        ]
        streamed = [id for chunk in chunks for id in getattr(chunk, "token_ids", None) or ()]
        assert streamed == whole.token_ids
        assert whole.logprobs is not None
        assert whole.logprobs.content is not None
        assert len(whole.logprobs.content) == len(streamed)
        assert [*stack.gateway.ids(SPOKEN["mistral_v3"])] == streamed[:-1]


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [WEATHER] * 2}, "tools.1.function.name", "must differ"),
    ({"tools": [CLOCK] * 129}, "tools", "at most 128"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools.0.function.name",
        "must match",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}]},
        "tools.0.function.parameters",
        "JSON Schema of an object",
    ),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
    (
        {"tools": [CLOCK, BROKEN], "tool_choice": "required"},
        "tools.1.function.parameters",
        "of 'a': the grammar cannot be compiled: properties.b: Invalid type: thing",
    ),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "must be"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice",
        "must name one of tools",
    ),
    *(
        (
            {
                "tools": TOOLS,
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": tools},
                },
            },
            param,
            rule,
        )
        for tools, param, rule in (
            ([], "tool_choice.allowed_tools.tools", "must name one of tools at least"),
            (
                [CLOCK, {"type": "function", "function": {"name": "rm"}}],
                "tool_choice.allowed_tools.tools",
                "must name one of tools, got 'rm'",
            ),
            ([{"type": "mcp"}], "tool_choice", "tools, which are functions"),
        )
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": TOOLS}},
        "tool_choice",
        "of type allowed_tools",
    ),
]
ARGUMENTS = ["", "[]", "{", '{"a": NaN}', "7", '{"a": "\\ud800"}', "[" * 5000]


async def test_wrong_tools_are_refused_by_the_name_of_the_field(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        chat = stack.gateway.openai.chat.completions
        call = {"id": "c", "type": "function"}
        wrong = list(WRONG)
        for arguments in ARGUMENTS:
            function = {"name": "clock", "arguments": arguments}
            turn = {"role": "assistant", "tool_calls": [call, call | {"function": function}]}
            turn["tool_calls"][0] = call | {  # type: ignore[index]
                "function": {"name": "clock", "arguments": "{}"}
            }
            field = "messages.1.tool_calls.1.function.arguments"
            wrong.append(({"messages": [*ASK, turn]}, field, "JSON"))
        function = {"name": "clock", "arguments": '{"a": [1e999]}'}
        turn = {"role": "assistant", "tool_calls": [call | {"function": function}]}
        field = "messages.1.tool_calls.0.function.arguments"
        wrong.append(({"messages": [*ASK, turn]}, field, "no number beyond 1.8e308"))
        untold = {"role": "tool", "content": "x"}
        rule = "must be given"
        wrong.append(({"messages": [untold]}, "messages.0.tool_call_id", rule))
        for fields, param, rule in wrong:
            body = {"model": MODEL, "messages": ASK} | fields
            with pytest.raises(openai.BadRequestError) as caught:
                await chat.create(**body)
            assert caught.value.param == param, fields
            assert rule in str(caught.value)
        assert not stack.scheduler.submits


async def test_a_template_without_tools_refuses_them(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("gemma3", tmp_path, redis_url, cell) as stack:
        with pytest.raises(openai.BadRequestError) as caught:
            await stack.gateway.openai.chat.completions.create(
                model=MODEL, messages=ASK, tools=TOOLS
            )
        assert caught.value.param == "tools"
        assert "chat template knows no tools" in str(caught.value)


async def test_the_only_call_ends_the_computation(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    """With the count of tokens that everybody tells."""
    async with speaking("mistral_v3", tmp_path, redis_url, cell, tokens_per_step=1) as stack:
        stack.says(SPOKEN["mistral_v3"] + " and so on" * 100)
        chat = stack.gateway.openai.chat.completions
        reply = await chat.create(
            model=MODEL,
            messages=ASK,
            tools=TOOLS,
            parallel_tool_calls=False,
            extra_headers={"idempotency-key": "one"},
        )
        assert called(reply.choices[0].message) == [("get_weather", PARIS)]
        assert reply.choices[0].finish_reason == "tool_calls"
        assert reply.usage is not None
        count = reply.usage.completion_tokens
        end = SPOKEN["mistral_v3"].index(PARIS) + len(PARIS)
        assert count == len(stack.gateway.ids(SPOKEN["mistral_v3"][:end]))
        await until(lambda: bool(stack.scheduler.cancels), "the cancel")
        assert stack.scheduler.cancels[0].output_tokens == count
        seen = await stack.gateway.inference.GetRequest(pb.GetRequestRequest(request_id="one"))
        assert [each.output_tokens for each in seen.choices] == [count]


STRICT: Any = json.loads(json.dumps(WEATHER))
STRICT["function"]["strict"] = True


async def grammar_of(stack: Stack, **fields: Any) -> str:
    """What its calls are held by."""
    await stack.gateway.openai.chat.completions.create(model=MODEL, messages=ASK, **fields)
    return str(stack.scheduler.submits[-1].sampling.grammar)


async def test_of_allowed_tools_a_grammar_knows_no_others(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    allowed: Any = {"type": "allowed_tools"}
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says("Hm.")
        for mode in ("auto", "required"):
            only = [{"type": "function", "function": {"name": "clock"}}]
            allowed["allowed_tools"] = {"mode": mode, "tools": only}
            held = await grammar_of(stack, tools=TOOLS, tool_choice=allowed)
            assert "clock" in held
            assert "get_weather" not in held
            assert ("TEXT" in held) is (mode == "auto")
        # Nothing is left to be kept to.
        allowed["allowed_tools"] = {"mode": "auto", "tools": TOOLS}
        assert not await grammar_of(stack, tools=TOOLS, tool_choice=allowed)


# Of answers, and what must be called.
FORM: Any = {"type": "json_schema", "json_schema": {"schema": {"enum": ["no"]}}}
FORCED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}


async def test_strict_calls_are_held_by_a_grammar(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says("Hm.")
        assert not await grammar_of(stack, tools=TOOLS)
        held = await grammar_of(stack, tools=[STRICT, CLOCK])
        assert "city" in held
        assert "TEXT" in held
        both = await grammar_of(stack, tools=TOOLS, response_format=FORM)
        assert "get_weather" in both
        assert '"enum": ["no"]' in both
        # Where a call must be made there is no answer that could be of it.
        forced = await grammar_of(stack, **FORCED)
        assert await grammar_of(stack, **FORCED, response_format=FORM) == forced
        # Said by other keywords, as it would be alone.
        either = {"oneOf": [{"const": "now"}, {"const": "then"}]}
        when: Any = {"type": "object", "properties": {"when": either}}
        ask_when = {"type": "function", "function": {"name": "ask", "parameters": when}}
        assert "then" in await grammar_of(stack, tools=[ask_when], tool_choice="required")


async def test_calls_that_no_grammar_can_hold_are_refused(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        chat = stack.gateway.openai.chat.completions
        broken = json.loads(json.dumps(BROKEN))
        broken["function"]["strict"] = True
        lark = {"structured_outputs": {"grammar": 'start: "a"'}}
        open_ones = [{"type": "object", "properties": {f"k{i}": {}}} for i in range(129)]
        many = {"name": "many", "parameters": {"properties": {"a": {"anyOf": open_ones}}}}
        wrong: list[tuple[dict[str, Any], str, str]] = [
            (
                {"tools": [TOOLS[0], broken]},
                "tools.1.function.parameters",
                "of 'a': the grammar cannot be compiled: properties.b: Invalid type: thing",
            ),
            (
                {"tools": TOOLS, "extra_body": {"structured_outputs": {"regex": "("}}},
                "structured_outputs",
                "unclosed group",
            ),
            (
                {
                    "tools": [CLOCK, {"type": "function", "function": many}],
                    "tool_choice": "required",
                },
                "tools.1.function.parameters",
                "of 'many': the grammar cannot be compiled: .*at most 128 arrays",
            ),
            (
                {**FORCED, "extra_body": {"structured_outputs": {"regex": "("}}},
                "structured_outputs",
                "unclosed group",
            ),
            ({"tools": [STRICT], "extra_body": {"min_tokens": 3}}, "min_tokens", "must not be set"),
            ({"tools": TOOLS, "extra_body": lark}, "structured_outputs", "no grammar beside"),
        ]
        for fields, param, rule in wrong:
            with pytest.raises(openai.BadRequestError, match=rule) as caught:
                await chat.create(model=MODEL, messages=ASK, **fields)
            assert caught.value.param == param, fields
    async with speaking("llama3_1", tmp_path, redis_url, cell) as stack:
        chat = stack.gateway.openai.chat.completions
        with pytest.raises(openai.BadRequestError, match="calls have no marks") as caught:
            await chat.create(model=MODEL, messages=ASK, tools=TOOLS, response_format=FORM)
        assert caught.value.param == "response_format"
