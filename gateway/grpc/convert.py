"""Between gRPC messages and our own values. What comes in is judged by `validation`, not here."""

import hashlib
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from gateway.requests import structured_outputs
from gateway.requests.stream import Accepted, Delta, Done, Event, Explained, Finished
from gateway.requests.validation import TooMany
from gateway.text.tools.flat import flat
from gateway.values.generation_request import (
    NO_PARAMETERS,
    ChatPrompt,
    GenerationRequest,
    Message,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Tool,
    ToolCall,
)
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import model_service_pb2 as model_pb
from kaiten.v1.common_pb2 import SamplingParams
from service_kit.error_table import retry_after_s
from service_kit.errors import InvalidRequest, KaitenError
from service_kit.grpc_errors import MESSAGE_CHARS_MAX, code_of

ItemT = TypeVar("ItemT")

# More than any list of a request may have, and token ids than any context: what is longer is
# refused before anything is made of it, which takes a microsecond for each.
LIST_MAX: Final = 1 << 14
IDS_MAX: Final = 1 << 20


def ask_from_proto(
    message: pb.GenerateRequest,
    *,
    timeout_s: float | None = None,
    grace_s: float = 1.0,
    traceparent: str = "",
) -> GenerationRequest:
    """A GenerateRequest as a request. InvalidRequest only when there is no input at all."""
    # Lists that are too long are refused before they are hashed.
    prompt, sampling = _prompt_from_proto(message), _bounded(message.sampling)
    stop = tuple(_few("stop", message.stop))
    return GenerationRequest(
        prompt=prompt,
        body_hash=_hash(message),
        request_id=message.request_id,
        model=message.model,
        sampling=sampling,
        n=message.n if message.HasField("n") else None,
        stop=stop,
        return_token_ids=message.return_token_ids,
        keep_running=message.keep_running,
        include_stop=message.include_stop,
        show_special_tokens=message.show_special_tokens,
        with_cursors=message.return_cursors,
        **_parsing(message),
        priority=message.priority,
        is_stream=True,
        timeout_s=timeout_s,
        grace_s=grace_s,
        traceparent=traceparent,
    )


def write_event(message: pb.GenerationEvent, event: Event, *, with_token_ids: bool) -> None:
    """An event as the client sees it, into its place: on the path of every token nothing is made
    twice."""
    if type(event) is not Delta:
        message.CopyFrom(_rare_event_to_proto(event))
        return
    delta = message.delta
    delta.choice = event.choice
    delta.position = event.position
    delta.token_count = len(event.token_ids)
    if event.pieces is None:
        delta.text = event.text
    else:
        delta.text, delta.reasoning, calls = flat(event.pieces)
        for call in calls:
            delta.tool_calls.add(
                index=call.number, id=call.id, name=call.name, arguments=call.arguments
            )
    if with_token_ids:
        delta.token_ids.extend(event.token_ids)
    if event.logprobs:
        delta.logprobs.extend(event.logprobs)
    if event.cursor:
        delta.cursor = event.cursor


def error_to_proto(error: KaitenError) -> pb.RequestError:
    """What the request's own RPC would have ended with."""
    message = pb.RequestError(code=code_of(error).value[0], message=error.told[:MESSAGE_CHARS_MAX])
    if isinstance(error, InvalidRequest):
        message.fields.extend(
            pb.FieldError(field=each.field, rule=each.rule[:MESSAGE_CHARS_MAX])
            for each in error.violations
        )
    if (wait_s := retry_after_s(error)) is not None:
        message.retry_after_ms = int(wait_s * 1000)
    return message


def tokenize_from_proto(message: model_pb.TokenizeRequest) -> GenerationRequest:
    match message.WhichOneof("input"):
        case "text":
            prompt: Prompt = TextPrompt(text=message.text)
        case "conversation":
            _choice(message.conversation)
            prompt = chat_from_proto(message.conversation)
        case _:
            raise InvalidRequest("input", "one of text and conversation must be set")
    return GenerationRequest(prompt=prompt, body_hash=b"", model=message.model)


def detokenize_from_proto(message: model_pb.DetokenizeRequest) -> GenerationRequest:
    return GenerationRequest(
        prompt=TokenPrompt(token_ids=tuple(_few("token_ids", message.token_ids, IDS_MAX))),
        body_hash=b"",
        model=message.model,
        show_special_tokens=message.show_special_tokens,
    )


def finished_to_proto(event: Finished) -> pb.ChoiceFinished:
    return pb.ChoiceFinished(
        choice=event.choice,
        reason=event.reason,
        output_tokens=event.output_tokens,
        error=event.error,
        is_retryable=event.is_retryable,
        is_unsatisfiable=event.is_unsatisfiable,
    )


def _rare_event_to_proto(event: Event) -> pb.GenerationEvent:
    match event:
        case Accepted(request_id, prompt_tokens):
            accepted = pb.Accepted(request_id=request_id, prompt_tokens=prompt_tokens)
            return pb.GenerationEvent(accepted=accepted)
        case Explained(_, token_ids, logprobs):
            prompt = pb.PromptWithLogprobs(token_ids=token_ids, logprobs=logprobs)
            return pb.GenerationEvent(prompt=prompt)
        case Finished():
            return pb.GenerationEvent(finished=finished_to_proto(event))
        case Done(message):
            return pb.GenerationEvent(done=message)
    raise AssertionError(f"no event: {event!r}")


def _prompt_from_proto(message: pb.GenerateRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(text=message.text)
        case "token_ids":
            return TokenPrompt(
                token_ids=tuple(_few(TokenPrompt.field, message.token_ids.ids, IDS_MAX))
            )
        case "conversation":
            return chat_from_proto(message.conversation)
    raise InvalidRequest("input", "one of text, token_ids and conversation must be set")


def _parsing(message: pb.GenerateRequest) -> dict[str, Any]:
    """The fields of a request that say how its output is read. InvalidRequest: they need that."""
    conversation = message.conversation
    for name in ("tool_choice", "parallel_tool_calls"):
        if conversation.HasField(name) and not message.parse_output:
            raise InvalidRequest(f"conversation.{name}", "needs parse_output")
    for index, tool in enumerate(_few("conversation.tools", conversation.tools)):
        if tool.strict and not message.parse_output:
            raise InvalidRequest(f"conversation.tools.{index}.strict", "needs parse_output")
    return {
        "is_read": message.parse_output,
        "is_single_call": conversation.HasField("parallel_tool_calls")
        and not conversation.parallel_tool_calls,
        **_choice(conversation),
    }


def _choice(message: pb.Conversation) -> dict[str, tuple[str, ...]]:
    """Who must be called, or who alone may be."""
    choice, known = message.tool_choice, dict.fromkeys(tool.name for tool in message.tools)
    field = "conversation.tool_choice"
    is_named, mode = choice.WhichOneof("choice") == "name", choice.mode
    if mode not in pb.ToolChoiceMode.values():
        raise InvalidRequest(field, f"must be a known mode, got {mode}")
    if mode == pb.TOOL_CHOICE_MODE_REQUIRED and not known:
        raise InvalidRequest(field, "needs tools")
    allowed = dict.fromkeys(_few(f"{field}.allowed_names", choice.allowed_names))
    if allowed and (is_named or mode == pb.TOOL_CHOICE_MODE_NONE):
        raise InvalidRequest(f"{field}.allowed_names", "is for the modes AUTO and REQUIRED")
    for name in [choice.name] if is_named else allowed:
        if name not in known:
            where = field if is_named else f"{field}.allowed_names"
            raise InvalidRequest(where, f"must name one of tools, got {name[:64]!r}")
    if is_named:
        return {"must_call": (choice.name,)}
    if mode == pb.TOOL_CHOICE_MODE_REQUIRED:
        return {"must_call": tuple(allowed or known)}
    return {"may_call": () if allowed == known else tuple(allowed)}


def chat_from_proto(message: pb.Conversation) -> ChatPrompt:
    tools = _few("conversation.tools", message.tools)
    if message.tool_choice.mode == pb.TOOL_CHOICE_MODE_NONE:
        tools = ()
    return ChatPrompt(
        messages=tuple(_message(turn) for turn in _few(ChatPrompt.field, message.messages)),
        options=_options(message.template_options),
        tools=tuple(
            Tool(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters or NO_PARAMETERS,
                is_strict=tool.strict,
            )
            for tool in tools
        ),
    )


def _options(given: Sequence[pb.TemplateOption]) -> tuple[tuple[str, object], ...]:
    field = "conversation.template_options"
    found: dict[str, object] = {}
    for option in _few(field, given):
        kind = option.WhichOneof("value")
        if kind is None:
            raise InvalidRequest(field, f"{option.name[:64]!r} must have flag, text or number")
        if option.name in found:
            raise InvalidRequest(field, f"must not name an option twice, got {option.name[:64]!r}")
        found[option.name] = getattr(option, kind)
    return tuple(found.items())


def _message(turn: pb.ChatMessage) -> Message:
    calls = tuple(
        ToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in _few(f"{ChatPrompt.field}.tool_calls", turn.tool_calls)
    )
    return Message(
        role=turn.role,
        content=turn.content or None if calls else turn.content,
        name=turn.name,
        reasoning=turn.reasoning,
        tool_calls=calls,
        tool_call_id=turn.tool_call_id,
    )


def _bounded(message: SamplingParams) -> SamplingParams:
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words"):
        _few(f"sampling.{name}", getattr(message, name))
    _few(structured_outputs.FIELD, message.structured_outputs.choice.texts)
    for word in message.bad_words:
        _few("sampling.bad_words", word.token_ids, LIST_MAX // 16)
    return message


def _few(field: str, items: Sequence[ItemT], most: int = LIST_MAX) -> Sequence[ItemT]:
    if len(items) > most:
        raise TooMany(field, most, len(items), "items")
    return items


def _hash(message: pb.GenerateRequest) -> bytes:
    """Of what decides the output: a repeat may ask for another presentation."""
    body = pb.GenerateRequest()
    body.CopyFrom(message)
    body.ClearField("request_id")
    body.ClearField("return_token_ids")
    body.ClearField("keep_running")
    body.ClearField("return_cursors")
    return hashlib.sha256(body.SerializeToString(deterministic=True)).digest()
