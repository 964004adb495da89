"""From the arguments of `generate` to a GenerateRequest."""

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Final, TypeAlias, TypedDict, cast

from google.protobuf.message import Message as ProtoMessage

from kaiten.client.errors import InvalidRequestError
from kaiten.client.results import ToolCall
from kaiten.v1 import common_pb2, inference_service_pb2
from kaiten.v1.common_pb2 import SamplingParams, StructuredOutputs

# A text, token ids as they are, or a conversation for the chat template.
Message: TypeAlias = Mapping[str, object]
Input: TypeAlias = str | Sequence[int] | Sequence[Message]


class GenerateOptions(TypedDict, total=False):
    """Everything but the text prompt. An unset sampling field means the model's own default."""

    # Instead of a text prompt: token ids as they are, or a conversation for the chat template.
    token_ids: Sequence[int]
    # Of a message: role, content, name, reasoning, tool_calls (id, name, arguments), tool_call_id.
    messages: Sequence[Message]
    # Functions that the model may call: name, description, parameters (a JSON Schema, or its text)
    # and strict; or as OpenAI has them. With `messages`.
    tools: Sequence[Mapping[str, object]]
    # "auto", "none", "required", or {"name": …} of the one to call.
    tool_choice: str | Mapping[str, object] | None
    parallel_tool_calls: bool | None
    # Reasoning and tool calls come apart from the text. Unset: where tools are given.
    parse_output: bool | None
    model: str
    # For idempotency and for `attach`; minted when missing.
    request_id: str
    n: int
    stop: Sequence[str]
    return_token_ids: bool
    # Leaving does not cancel: come back with `attach`.
    keep_running: bool
    # Larger runs first where the policy looks at it.
    priority: int
    # The text ends with what stopped it.
    include_stop: bool
    # Control tokens that the model produced are text.
    show_special_tokens: bool
    # Of the whole request, from submit to the last token. Travels with it.
    timeout_s: float | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    ignore_eos: bool | None
    stop_token_ids: Sequence[int]
    logprobs: int | None
    # Of the prompt's own tokens, with this many likeliest ones: in the completion's `prompt`.
    # max_tokens may then be 0.
    prompt_logprobs: int | None
    # Divides positive and multiplies negative logits of every token of prompt and output; 1: none.
    repetition_penalty: float | None
    # Subtracted once, and for every time, from the logit of a token of the output.
    presence_penalty: float | None
    frequency_penalty: float | None
    # Token id -> what is added to its logit.
    logit_bias: Mapping[int, float] | None
    # Nothing else is ever sampled.
    allowed_token_ids: Sequence[int] | None
    # Token sequences that the output never contains.
    bad_words: Sequence[Sequence[int]] | None
    # What the whole output must be: one of json (a schema, or its text), json_object (true), regex,
    # choice (texts) and grammar (Lark or GBNF); disable_any_whitespace besides.
    structured_outputs: Mapping[str, object] | None


SAMPLING = frozenset(field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields)
TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids")
PLAIN = (
    "model",
    "n",
    "return_token_ids",
    "keep_running",
    "priority",
    "include_stop",
    "show_special_tokens",
    "parse_output",
)
OF_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
SHOWN_CHARS_MAX: Final = 80
CHOICES: Final = {
    "auto": inference_service_pb2.TOOL_CHOICE_MODE_AUTO,
    "none": inference_service_pb2.TOOL_CHOICE_MODE_NONE,
    "required": inference_service_pb2.TOOL_CHOICE_MODE_REQUIRED,
}


def request_of_many(one: object, options: GenerateOptions) -> inference_service_pb2.GenerateRequest:
    """The message for one prompt of many that share their options."""
    for name in ("token_ids", "messages", "request_id"):
        if name in options:
            raise InvalidRequestError(f"{name} is of one request, not of many", fields=(name,))
    if isinstance(one, str):
        return request_from(one, options)
    if not isinstance(one, Sequence):
        rule = f"a prompt must be a text, token ids or messages, got {_shown(one)}"
        raise InvalidRequestError(rule, fields=("prompts",))
    is_conversation = bool(one) and isinstance(one[0], Mapping)
    asked = {**options, "messages" if is_conversation else "token_ids": one}
    return request_from(None, cast(GenerateOptions, asked))


def request_from(
    prompt: str | None, options: GenerateOptions
) -> inference_service_pb2.GenerateRequest:
    """The message; it always has a request_id, so that repeating it is harmless."""
    given = {key: value for key, value in options.items() if value is not None}
    inputs = [prompt, given.pop("token_ids", None), given.pop("messages", None)]
    if sum(each is not None for each in inputs) != 1:
        raise InvalidRequestError(
            "give exactly one of prompt, token_ids and messages",
            fields=("prompt", "token_ids", "messages"),
        )
    given.pop("timeout_s", None)
    of_tools: dict[str, Any] = {name: given.pop(name) for name in OF_TOOLS if name in given}
    if of_tools and inputs[2] is None:
        raise InvalidRequestError("tools are of a conversation", fields=tuple(of_tools))
    request_id = str(given.pop("request_id", "") or uuid.uuid4().hex)
    with _field("request_id", request_id):
        request = inference_service_pb2.GenerateRequest(request_id=request_id)
    _set_input(request, *inputs)
    if of_tools:
        given.setdefault("parse_output", True)
        _set_tools(request.conversation, **of_tools)
    for name, value in given.items():
        with _field(name, value):
            _set_option(request, name, value)
    return request


def attach_to(
    request_id: str, positions: Sequence[int], *, return_token_ids: bool, keep_running: bool
) -> inference_service_pb2.AttachRequest:
    with _field("positions", positions):
        return inference_service_pb2.AttachRequest(
            request_id=id_of(request_id),
            positions=positions,
            return_token_ids=return_token_ids,
            keep_running=keep_running,
        )


def id_of(request_id: object) -> str:
    """Of an accepted request. InvalidRequestError: it is no text."""
    with _field("request_id", request_id):
        if not isinstance(request_id, str):
            raise TypeError("it must be a text")
        # A text that no message can carry.
        request_id.encode()
        return request_id


@contextmanager
def _field(name: str, value: object) -> Iterator[None]:
    """protobuf refuses what a field cannot hold: a negative count, text for a number."""
    try:
        yield
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        said = f"{name}: cannot be {_shown(value)}: {error}"
        raise InvalidRequestError(said, fields=(name,)) from error


def _shown(value: object) -> str:
    return repr(value)[:SHOWN_CHARS_MAX]


def _set_input(
    request: inference_service_pb2.GenerateRequest,
    prompt: object,
    token_ids: object,
    messages: object,
) -> None:
    if prompt is not None:
        with _field("prompt", prompt):
            if not isinstance(prompt, str):
                raise TypeError("it must be a text")
            request.text = prompt
    elif token_ids is not None:
        request.token_ids.SetInParent()
        with _field("token_ids", token_ids):
            request.token_ids.ids.extend(token_ids)  # type: ignore[arg-type]  # protobuf checks it
    else:
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
            rule = f"messages must be several, each with role and content; got {_shown(messages)}"
            raise InvalidRequestError(rule, fields=("messages",))
        for index, message in enumerate(messages):
            with _field(f"messages.{index}", message):
                request.conversation.messages.append(_message(message))
        request.conversation.SetInParent()


def _message(given: Mapping[str, Any]) -> inference_service_pb2.ChatMessage:
    _check_texts("a message", given, inference_service_pb2.ChatMessage)
    calls = [
        asdict(each) if isinstance(each, ToolCall) else each
        for each in given.get("tool_calls") or ()
    ]
    for each in calls:
        _check_texts("a tool call", each, inference_service_pb2.ToolCall)
    made = [inference_service_pb2.ToolCall(**each) for each in calls]
    return inference_service_pb2.ChatMessage(**{**given, "tool_calls": made})


def _check_texts(what: str, given: object, kind: type[ProtoMessage]) -> None:
    """protobuf does not say which of them is none."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} is a mapping, with {', '.join(kind.DESCRIPTOR.fields_by_name)}")
    for field in kind.DESCRIPTOR.fields:
        is_text = isinstance(given.get(field.name), str | bytes | None)
        if field.type == field.TYPE_STRING and not is_text:
            raise TypeError(f"{field.name} must be a text")


def _set_tools(
    conversation: inference_service_pb2.Conversation,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
) -> None:
    with _field("tools", tools):
        listed = list(tools)
    for index, tool in enumerate(listed):
        with _field(f"tools.{index}", tool):
            conversation.tools.append(_tool(tool))
    if tool_choice is not None:
        with _field("tool_choice", tool_choice):
            _set_choice(conversation.tool_choice, tool_choice)
    if parallel_tool_calls is not None:
        with _field("parallel_tool_calls", parallel_tool_calls):
            conversation.parallel_tool_calls = parallel_tool_calls


def _tool(tool: Mapping[str, Any]) -> inference_service_pb2.Tool:
    given = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if isinstance(given, Mapping) and not isinstance(given.get("parameters", ""), str):
        given = {**given, "parameters": json.dumps(given["parameters"], ensure_ascii=False)}
    _check_texts("a tool", given, inference_service_pb2.Tool)
    return inference_service_pb2.Tool(**given)


def _set_choice(choice: inference_service_pb2.ToolChoice, given: str | Mapping[str, Any]) -> None:
    """One that must be called, or those that may; as OpenAI says it, or by names alone."""
    if isinstance(given, str) and given in CHOICES:
        choice.mode = CHOICES[given]
        return
    if not isinstance(given, Mapping) or not given:
        forms = "{'name': …} or {'mode': …, 'tools': [name, …]}"
        raise TypeError(f"it must be {', '.join(CHOICES)}, {forms}")
    allowed = given.get("allowed_tools", given)
    if "tools" not in allowed:
        choice.name = given.get("function", given)["name"]
        return
    if not allowed["tools"]:
        raise ValueError("tools must name one at least")
    choice.mode = CHOICES[allowed.get("mode", "auto")]
    for tool in allowed["tools"]:
        name = tool if isinstance(tool, str) else tool.get("function", tool)["name"]
        choice.allowed_names.append(name)


def _set_option(request: inference_service_pb2.GenerateRequest, name: str, value: object) -> None:
    if name in PLAIN:
        setattr(request, name, value)
    elif name == "stop":
        request.stop.extend([value] if isinstance(value, str) else value)  # type: ignore[arg-type]
    elif name in TOKEN_LISTS:
        getattr(request.sampling, name).extend(value)
    elif name in _SETTERS:
        _SETTERS[name](request.sampling, value)
    elif name in SAMPLING:
        setattr(request.sampling, name, value)
    else:
        known = ", ".join(GenerateOptions.__annotations__)
        raise InvalidRequestError(f"there is no option {name!r}; there are {known}", fields=(name,))


def _set_biases(sampling: SamplingParams, given: Any) -> None:
    for token_id, bias in dict(given).items():
        sampling.logit_bias.add(token_id=token_id, bias=bias)


def _set_bad_words(sampling: SamplingParams, given: Any) -> None:
    for word in given:
        sampling.bad_words.add(token_ids=word)


def _set_structured(sampling: SamplingParams, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise TypeError("it must be a mapping")
    message = sampling.structured_outputs
    message.SetInParent()
    asked = {key: value for key, value in given.items() if value is not None}
    forms = [key for key in asked if key != "disable_any_whitespace"]
    if len(forms) > 1:
        raise TypeError(f"it must have one of {' and '.join(map(repr, forms))}")
    for key, value in asked.items():
        if key == "choice":
            if isinstance(value, str):
                raise TypeError("choice must be several texts")
            message.choice.texts.extend(value)
        elif key == "json" and not isinstance(value, str):
            message.json = json.dumps(value, ensure_ascii=False)
        elif key in StructuredOutputs.DESCRIPTOR.fields_by_name:
            setattr(message, key, value)
        else:
            raise TypeError(f"structured_outputs has no {key!r}")


_SETTERS: Final[Mapping[str, Callable[[SamplingParams, Any], None]]] = {
    "logit_bias": _set_biases,
    "bad_words": _set_bad_words,
    "structured_outputs": _set_structured,
}
