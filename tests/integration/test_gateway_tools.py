"""Tool calls and reasoning as the real `openai` package gets them, by several families."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from kaiten.client import AsyncClient
from kaiten.v1 import inference_service_pb2 as pb
from tests.support.gateway_stack import MODEL, Stack, running_gateway, running_stack, text_of, until
from tests.support.tokenizers import byte_level_bpe, token_id, write_model_folder

TEMPLATES = Path(__file__).parents[1] / "parity" / "templates"
# As in the checkpoints: some marks are control tokens, which no text shows, and some are not.
CONTROL = ["[TOOL_CALLS]", "<|python_tag|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
ASK: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
PARIS = '{"city": "Paris"}'
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say <|im_end|> never.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
# Of an object, and yet no schema.
BROKEN: Any = {
    "type": "function",
    "function": {"name": "a", "parameters": {"properties": {"b": {"type": "thing"}}}},
}
TOOLS: list[Any] = [WEATHER, CLOCK]
SPOKEN = {
    "qwen3": f'<think>\nHm.\n</think>\n\nI see.\n<tool_call>\n{{"name": "get_weather", "arguments":'
    f' {PARIS}}}\n</tool_call>\n<tool_call>\n{{"name": "clock", "arguments": {{}}}}\n</tool_call>',
    "mistral_v3": f'I see.[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, '
    '{"name": "clock", "arguments": {}}]',
    "llama3_1": f'<|python_tag|>{{"name": "get_weather", "parameters": {PARIS}}}; '
    '{"name": "clock", "parameters": {}}',
}


def tokenizer() -> Tokenizer:
    built: Tokenizer = Tokenizer.from_str(byte_level_bpe().to_str())
    built.add_special_tokens(CONTROL)
    built.add_tokens([AddedToken(text, normalized=False, special=False) for text in PLAIN])
    return built


@asynccontextmanager
async def speaking(
    family: str, tmp_path: Path, redis_url: str, cell: str, **options: Any
) -> AsyncIterator[Stack]:
    """A stack whose model has the template of a family."""
    folder = write_model_folder(
        tmp_path / family,
        tokenizer(),
        config={"max_position_embeddings": 4096},
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8"),
    )
    # Each step is a commit of the ledger; some pieces of text still come in two.
    async with running_stack(
        folder, redis_url, cell, **({"tokens_per_step": 5} | options)
    ) as stack:
        yield stack


def called(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]


def prompt_of(stack: Stack, index: int = -1) -> str:
    ids = stack.scheduler.submits[index].prompt_token_ids
    return stack.gateway.card.tokenizer.decode(list(ids), skip_special_tokens=False)


@pytest.mark.parametrize("family", SPOKEN)
async def test_calls_whole_and_streamed(
    family: str, tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking(family, tmp_path, redis_url, cell) as stack:
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
    ({"tools": [BROKEN], "tool_choice": "required"}, "tools", "Invalid type: thing"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice", "must be"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "rm"}}},
        "tool_choice",
        "must name one of tools",
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
            await until(lambda: not other.service.front.readiness.problem, "readiness")
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
    async with speaking("qwen3", tmp_path, redis_url, cell, tokens_per_step=1) as stack:
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
            ({"name": "rm"}, "must name one of tools"),
        ):
            asked = conversation(tool_choice=choice)
            with pytest.raises(grpc.aio.AioRpcError, match=rule):
                await stack.generate(conversation=asked, parse_output=True)


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


async def test_strict_calls_are_held_by_a_grammar_or_refused(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"schema": {"enum": ["no"]}}}
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        stack.says("Hm.")
        chat = stack.gateway.openai.chat.completions

        async def grammar_of(**fields: Any) -> str:
            await chat.create(model=MODEL, messages=ASK, **fields)
            return str(stack.scheduler.submits[-1].sampling.grammar)

        assert not await grammar_of(tools=TOOLS)
        held = await grammar_of(tools=[STRICT, CLOCK])
        assert "city" in held
        assert "TEXT" in held
        both = await grammar_of(tools=TOOLS, response_format=schema)
        assert "get_weather" in both
        assert '"enum": ["no"]' in both
        broken = json.loads(json.dumps(BROKEN))
        broken["function"]["strict"] = True
        lark = {"structured_outputs": {"grammar": 'start: "a"'}}
        wrong: list[tuple[dict[str, Any], str, str]] = [
            ({"tools": [broken]}, "tools", "Invalid type: thing"),
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
            await chat.create(model=MODEL, messages=ASK, tools=TOOLS, response_format=schema)
        assert caught.value.param == "response_format"


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
    async with speaking("qwen3", tmp_path, redis_url, cell, tokens_per_step=7) as stack:
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
            await until(lambda: not other.service.front.readiness.problem, "readiness")
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
        asked: dict[str, Any] = {"model": MODEL, "input": [*whole, *outputs]}
        nothing = dict.fromkeys(("prompt", "context_management", "moderation", "image"))
        await responses.create(**asked, tools=RESPONSE_TOOLS, extra_body=nothing)
        # The model was told the same every way, and in its own way.
        assert prompt_of(stack, -1) == prompt_of(stack, -2) == prompt_of(stack, -3)
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


async def test_wrong_tools_of_responses_are_named_as_its_body_has_them(
    tmp_path: Path, redis_url: str, cell: str
) -> None:
    async with speaking("qwen3", tmp_path, redis_url, cell) as stack:
        call = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "["}
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
            ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
            ({"tools": [RESPONSE_TOOLS[1]] * 2}, "tools.1.name"),
            ({"tool_choice": "required"}, "tool_choice"),
            ({"input": [call]}, "input"),
            ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type"),
        ]
        for fields, param in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                await stack.gateway.openai.responses.create(
                    **({"model": MODEL, "input": "x"} | fields)
                )
            assert caught.value.param == param, fields
