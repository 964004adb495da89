"""A tool that must be called is, by a real worker, whatever the model has learned."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletionAllowedToolChoiceParam
from openai.types.responses import ToolChoiceAllowed, ToolChoiceAllowedParam
from tokenizers import Tokenizer

from kaiten.client import Client
from kaiten.mini import CHECKPOINT
from tests.support.whole_stack import MODEL, WholeStack

TEMPLATE: Final = Path(__file__).parents[1] / "parity/templates/qwen2_5.jinja"
ORDER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "dish": {"enum": ["crab", "eel"]},
        "plates": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["dish", "plates"],
    "additionalProperties": False,
}
TOOLS: Final[list[Any]] = [
    {"type": "function", "function": {"name": "order", "parameters": ORDER}},
    {"type": "function", "function": {"name": "pay", "parameters": {"type": "object"}}},
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeStack]:
    folder = tmp_path_factory.mktemp("forced")
    model = folder / "model"
    shutil.copytree(CHECKPOINT, model)
    (model / "chat_template.jinja").write_text(TEMPLATE.read_text())
    flags = {"model": model}
    with WholeStack(folder / "stack", gateway_flags=flags, worker_flags=flags) as stack:
        yield stack


@pytest.fixture
def client(stack: WholeStack) -> Iterator[OpenAI]:
    with OpenAI(base_url=stack.door.openai, api_key="any", max_retries=0, timeout=60) as client:
        yield client


def test_one_by_name_and_any(client: OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "order"}}
    told = set()
    for seed in range(4):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Two crabs."}],
            tools=TOOLS,
            tool_choice=named,
            temperature=1.5,
            seed=seed,
        )
        # As OpenAI has it: that a call was to be made is no reason to end.
        assert reply.choices[0].finish_reason == "stop"
        assert reply.choices[0].message.content is None
        calls: list[Any] = reply.choices[0].message.tool_calls or []
        (call,) = calls
        assert call.function.name == "order"
        jsonschema.validate(json.loads(call.function.arguments), ORDER)
        told.add(call.function.arguments)
    assert len(told) > 1
    with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Two crabs."}],
        tools=TOOLS[:1],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "tool_calls"
    streamed: list[Any] = final.choices[0].message.tool_calls or []
    jsonschema.validate(json.loads(streamed[0].function.arguments), ORDER)


def test_one_that_is_cut_off_is_no_answer(client: OpenAI) -> None:
    flat: list[Any] = [{"type": "function", **TOOLS[0]["function"]}]
    for tokens in (1, 2, 4, 8):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Two crabs."}],
            tools=TOOLS,
            tool_choice="required",
            temperature=0,
            max_tokens=tokens,
        )
        assert reply.choices[0].finish_reason == "length"
        assert not reply.choices[0].message.content
        response = client.responses.create(
            model=MODEL,
            input="Two crabs.",
            tools=flat,
            tool_choice="required",
            temperature=0,
            max_output_tokens=tokens,
        )
        assert response.status == "incomplete"
        assert response.output_text == ""


def test_in_responses(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "order", "parameters": ORDER, "strict": True}
    response = client.responses.create(
        model=MODEL, input="An eel.", tools=[tool], tool_choice="required", temperature=0,
        parallel_tool_calls=False,
    )  # fmt: skip
    (item,) = response.output
    assert item.type == "function_call"
    jsonschema.validate(json.loads(item.arguments), ORDER)


def test_of_some_tools_only(client: OpenAI) -> None:
    """Though `order` is what it has learned to call."""
    allowed: ChatCompletionAllowedToolChoiceParam = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "pay"}}],
        },
    }
    asked: Any = {"messages": [{"role": "user", "content": "Two plates of crab, please."}]}
    asked |= {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 60}
    prompts = set()
    modes: tuple[Literal["required", "auto"], ...] = ("required", "auto")
    for mode in modes:
        allowed["allowed_tools"]["mode"] = mode
        reply = client.chat.completions.create(**asked, tool_choice=allowed)
        called: list[Any] = reply.choices[0].message.tool_calls or []
        assert {call.function.name for call in called} <= {"pay"}
        assert mode == "auto" or reply.choices[0].message.content is None
        assert reply.usage is not None
        prompts.add(reply.usage.prompt_tokens)
    free = client.chat.completions.create(**asked)
    assert free.usage is not None
    assert prompts == {free.usage.prompt_tokens}
    flat: Any = [{"type": "function", **each["function"]} for each in TOOLS]
    some: ToolChoiceAllowedParam = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "pay"}],
    }
    response = client.responses.create(
        model=MODEL, input="Two crabs.", tools=flat, tool_choice=some, max_output_tokens=60
    )
    assert isinstance(response.tool_choice, ToolChoiceAllowed)
    assert response.tool_choice.to_dict() == some
    assert {item.name for item in response.output if item.type == "function_call"} <= {"pay"}
    assert client.responses.retrieve(response.id).tool_choice == response.tool_choice
    some["tools"] = [{"type": "function", "name": "rm"}]
    with pytest.raises(BadRequestError, match="must name one of tools, got 'rm'") as caught:
        client.responses.create(model=MODEL, input="x", tools=flat, tool_choice=some)
    assert caught.value.param == "tool_choice.tools"


def test_over_grpc(stack: WholeStack) -> None:
    with Client(stack.door.grpc) as client:
        asked: Any = {"messages": [{"role": "user", "content": "Two crabs."}], "tools": TOOLS}
        for choice in ("required", {"name": "order"}):
            told = client.complete(
                **asked, tool_choice=choice, parallel_tool_calls=False, temperature=1.5, seed=3
            )
            assert told.text == ""
            (call,) = told.tool_calls
            arguments = json.loads(call.arguments)
            if call.name == "order":
                jsonschema.validate(arguments, ORDER)
            assert call.id


def test_a_strict_call_that_need_not_be_made_is_right_if_it_is(client: OpenAI) -> None:
    strict: Any = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    found, ends = [], set()
    for seed in range(6):
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Two crabs."}],
            tools=strict,
            parallel_tool_calls=False,
            temperature=1.5,
            # The mark, among all that such a heat may say before it.
            logit_bias={str(tokenizer.token_to_id("<tool_call>")): 6},
            max_tokens=200,
            seed=seed,
        )
        ends.add(reply.choices[0].finish_reason)
        if reply.choices[0].finish_reason == "tool_calls":
            found += reply.choices[0].message.tool_calls or []
    calls: list[Any] = found
    assert calls, ends
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), ORDER)
