"""What bodies written for vLLM and SGLang say here: the same, or a refusal by name."""

import json
from typing import Any

import pytest

from gateway.http import errors
from gateway.http.json_body import JsonBody
from gateway.openai.chat import ChatBody
from gateway.openai.completions import CompletionBody
from gateway.openai.generation_body import GenerationBody
from gateway.openai.request_body import parse
from gateway.requests.validation import Limits, check
from gateway.values.generation_request import ChatPrompt, GenerationRequest
from kaiten.v1.common_pb2 import Choices, StructuredOutputs
from service_kit.errors import InvalidRequest

LIMITS = Limits(vocab_size=30, context_tokens_max=20)
SCHEMA = {"type": "integer"}
GOOD: dict[type[GenerationBody], dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "x"}]},
    CompletionBody: {"prompt": "x"},
}
KINDS = pytest.mark.parametrize("kind", [ChatBody, CompletionBody])


def asked(kind: type[GenerationBody], **fields: Any) -> GenerationRequest:
    body = parse(kind, JsonBody.of(json.dumps(GOOD[kind] | fields).encode()))
    [request] = body.requests(LIMITS, 1)
    with body.aliased():
        check(request, LIMITS, "tiny")
    return request


def refusal(kind: type[GenerationBody], **fields: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        asked(kind, **fields)
    told = errors.body_of(caught.value).error
    assert told.message.startswith(f"{told.param}: ")
    return told.message


@KINDS
@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("guided_json", SCHEMA, StructuredOutputs(json=json.dumps(SCHEMA))),
        ("guided_json", "true", StructuredOutputs(json="true")),
        ("guided_json_object", True, StructuredOutputs(json_object=True)),
        ("guided_regex", "a+", StructuredOutputs(regex="a+")),
        ("guided_choice", ["a", "b"], StructuredOutputs(choice=Choices(texts=["a", "b"]))),
        ("guided_grammar", "start: A", StructuredOutputs(grammar="start: A")),
        ("json_schema", "{}", StructuredOutputs(json="{}")),
        ("regex", "a+", StructuredOutputs(regex="a+")),
        ("ebnf", 'root ::= "a"', StructuredOutputs(grammar='root ::= "a"')),
        # As what dumps all its fields sends it.
        (
            "structured_outputs",
            {"regex": "a", "disable_fallback": False, "disable_additional_properties": False},
            StructuredOutputs(regex="a"),
        ),
    ],
)
def test_what_an_output_must_be(
    kind: type[GenerationBody], name: str, value: Any, wanted: StructuredOutputs
) -> None:
    others = {"guided_decoding_backend": "xgrammar", "guided_json_object": False, "regex": None}
    request = asked(kind, **others | {name: value})
    assert request.sampling.structured_outputs == wanted


@KINDS
def test_it_is_said_once_and_complained_of_by_its_name(kind: type[GenerationBody]) -> None:
    both = refusal(kind, guided_regex="a", structured_outputs={"choice": ["a"]})
    assert both == "structured_outputs: must not be given together with guided_regex"
    assert refusal(kind, guided_choice=[]).startswith("guided_choice: must have no empty choice")
    assert refusal(kind, guided_json=1).startswith("guided_json: ")
    assert "at most 65536 bytes" in refusal(kind, guided_grammar="x" * 65_537)


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (ChatBody, "prompt", "here it is messages"),
        (ChatBody, "input", "here it is messages"),
        (ChatBody, "max_output_tokens", "here it is max_completion_tokens"),
        (ChatBody, "text", "here it is response_format"),
        (ChatBody, "previous_response_id", "it is for POST /v1/responses"),
        (CompletionBody, "messages", "it is for POST /v1/chat/completions"),
        (CompletionBody, "max_completion_tokens", "here it is max_tokens"),
        (CompletionBody, "top_logprobs", "here it is logprobs, a number"),
    ],
)
def test_what_is_called_otherwise_here_is_told(
    kind: type[GenerationBody], name: str, hint: str
) -> None:
    assert refusal(kind, **{name: ["x"]}) == f"{name}: is not a known field; {hint}"
    # Unless it says nothing.
    asked(kind, **{name: None})


def test_tools_are_for_chats() -> None:
    assert "POST /v1/chat/completions" in refusal(CompletionBody, tools=[{"type": "function"}])
    assert "POST /v1/chat/completions" in refusal(CompletionBody, tool_choice="required")
    asked(CompletionBody, tools=[], tool_choice="auto")


@KINDS
@pytest.mark.parametrize(
    ("name", "nothing", "something", "rule"),
    [
        ("use_beam_search", False, True, "is not supported"),
        ("length_penalty", 1.0, 2, "is not supported"),
        ("detokenize", True, False, "is not supported"),
        ("bad_words", [], ["x"], "bad_words_token_ids takes them"),
        ("truncate_prompt_tokens", None, 4, "is computed whole"),
        ("request_id", None, "mine", "Idempotency-Key names the request"),
        ("cache_salt", None, "x", "the requests of a tenant"),
        ("guided_whitespace_pattern", None, "", "disable_any_whitespace"),
        ("include_reasoning", True, False, "must be true"),
        ("chat_template", None, "{{ x }}", "that of the model's folder"),
    ],
)
def test_what_there_is_not_is_taken_where_it_asks_for_nothing(
    kind: type[GenerationBody], name: str, nothing: Any, something: Any, rule: str
) -> None:
    assert asked(kind, **{name: nothing}) == asked(kind)
    message = refusal(kind, **{name: something})
    assert message.startswith(f"{name}: ")
    assert rule in message


def test_of_chats() -> None:
    assert asked(ChatBody, best_of=1, echo=False, add_special_tokens=False) == asked(ChatBody)
    assert "ask for n" in refusal(ChatBody, best_of=2)
    assert "is for completions" in refusal(ChatBody, echo=True)
    assert "writes the special tokens itself" in refusal(ChatBody, add_special_tokens=True)


@pytest.mark.parametrize(
    ("last", "more", "rule"),
    [
        ({"role": "assistant", "content": "a"}, {"add_generation_prompt": True}, "given with"),
        ({"role": "assistant", "content": ""}, {}, "needs a last message"),
        (
            {
                "role": "assistant",
                "content": "a",
                "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
            },
            {},
            "no tool_calls",
        ),
    ],
)
def test_what_cannot_go_on(last: Any, more: Any, rule: str) -> None:
    fields = {"messages": [last], "continue_final_message": True} | more
    message = refusal(ChatBody, **fields)
    assert message.startswith("continue_final_message: ")
    assert rule in message


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "n"}, {"type": "text", "text": "o"}]},
        {"content": "no", "refusal": None},
    ],
)
def test_what_was_refused_is_text(turn: dict[str, Any]) -> None:
    """As in /v1/responses."""
    prompt = asked(ChatBody, messages=[{"role": "assistant"} | turn]).prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages[0].content == "no"


@KINDS
def test_engines_own_words_change_nothing(kind: type[GenerationBody]) -> None:
    assert asked(kind, spaces_between_special_tokens=False) == asked(kind)
