"""/v1/chat/completions: what it reads, and what it answers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.openai.generate import generating
from gateway.openai.generation_body import GenerationBody
from gateway.openai.logprobs import PromptLogprobs, TokenLogprob
from gateway.openai.parts import Chunk, Fields, Format, Head, Part, TokenIds
from gateway.openai.request_body import FAIL_FAST, Options, RequestBody
from gateway.openai.tools.body import ToolBody, ToolCallBody, ToolChoice, Tooling
from gateway.openai.tools.reading import Reading
from gateway.openai.usage import Count, Timing, Usage
from gateway.requests import structured_outputs
from gateway.requests.validation import Limits, check_option
from gateway.text.tools.parser import Call
from gateway.values.generation_request import Ask, ChatPrompt, Message
from service_kit.errors import InvalidRequest

ChatReason = Literal["stop", "length", "tool_calls"]


class ChatTopLogprob(Struct):
    token: str
    logprob: float | None
    bytes: list[Count]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatCalledFunction(Struct):
    name: str
    arguments: str


class ChatToolCall(Struct, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: ChatCalledFunction


class ChatToolCallDelta(ChatToolCall, kw_only=True):
    """A whole call, told when it is complete."""

    index: Count


class ChatMessage(Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(Struct):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None
    token_ids: TokenIds | UnsetType = UNSET


class ChatReply(Head, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    usage: Usage
    kaiten: Timing


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatReason | None
    token_ids: TokenIds | UnsetType = UNSET


class ChatChunk(Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


def _chunk_choice(part: Part) -> ChatChunkChoice:
    reason, logprobs = _reason(part), _logprobs(part.logprobs)
    delta = ChatDelta() if reason else ChatDelta(content=part.text)
    if part.is_first:
        delta = ChatDelta(role="assistant", content="")
    elif part.reasoning or part.calls:
        delta = ChatDelta(
            content=part.text or UNSET,
            reasoning_content=part.reasoning or UNSET,
            tool_calls=[_call_delta(call) for call in part.calls] or UNSET,
        )
    return ChatChunkChoice(part.choice, delta, logprobs, reason, part.token_ids)


def _choice(part: Part) -> ChatChoice:
    message = ChatMessage(
        content=None if part.calls and not part.text else part.text,
        reasoning_content=part.reasoning or UNSET,
        tool_calls=[_call(call) for call in part.calls] or UNSET,
    )
    logprobs = _logprobs(part.logprobs)
    return ChatChoice(part.choice, message, logprobs, _reason(part), part.token_ids)


def _reason(part: Part) -> ChatReason | None:
    """Whoever calls tools waits for what they say, unless it was cut off."""
    reason = part.reason
    return "tool_calls" if reason == "stop" and part.has_calls else reason


def _call(call: Call) -> ChatToolCall:
    return ChatToolCall(id=call.id, function=ChatCalledFunction(call.name, call.arguments))


def _call_delta(call: Call) -> ChatToolCallDelta:
    function = ChatCalledFunction(call.name, call.arguments)
    return ChatToolCallDelta(index=call.number, id=call.id, function=function)


def _reply(head: Fields, wholes: Sequence[Part], ends: Fields) -> ChatReply:
    """All choices share the prompt."""
    choices, prompt = [_choice(each) for each in wholes], wholes[0].prompt_logprobs
    return ChatReply(**head, choices=choices, prompt_logprobs=prompt, **ends)


def _logprobs(tokens: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    return None if tokens is None else ChatLogprobs(token_logprobs(tokens))


def token_logprobs(tokens: Sequence[TokenLogprob]) -> list[ChatTokenLogprob]:
    return [
        ChatTokenLogprob(
            each.text,
            each.logprob,
            list(each.raw),
            [ChatTopLogprob(text, logprob, list(raw)) for text, raw, logprob in each.top or ()],
        )
        for each in tokens
    ]


CHAT: Final = Format("chatcmpl-", ChatChunk, _chunk_choice, _reply)


class TextPart(RequestBody):
    """One part of a content that is a list."""

    type: Literal["text"]
    text: str


class ChatMessageBody(RequestBody):
    """A turn. Keys that only matter for display may be there if they say nothing."""

    role: str
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = None
    name: str | None = None
    """Who of that role speaks, for chat templates that show it."""
    refusal: None = None
    tool_calls: Annotated[list[ToolCallBody], FAIL_FAST] | None = None
    """Of an assistant's turn."""
    tool_call_id: str | None = None
    """Of a tool's turn: which call it answers."""
    reasoning_content: str | None = None
    """Of an assistant's turn, for chat templates that show it."""
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    FORMAT = CHAT
    identity = CHAT.id_prefix.encode()

    messages: Annotated[list[ChatMessageBody], FAIL_FAST]
    """What the model's chat template takes; together they leave room for an output token. Texts
    are bounded in bytes of UTF-8, all of them together."""
    max_completion_tokens: int | None = None
    """As max_tokens, which is not looked at where this is given."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Needs logprobs."""
    tools: Annotated[list[ToolBody], FAIL_FAST] | None = None
    """What the model may call, if its chat template knows tools."""
    tool_choice: ToolChoice | None = None
    """required, or one by name: the answer is calls of these tools with arguments that are valid by
    their schemas, and nothing else. Left out: auto."""
    parallel_tool_calls: bool | None = None
    """false: one call at most."""
    reasoning_effort: str | None = None
    """For chat templates that ask for it. chat_template_kwargs may say another."""
    chat_template_kwargs: Options | None = None

    @property
    def aliases(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        own = {"sampling.logprobs": "top_logprobs", "sampling.max_tokens": limit}
        return {**super().aliases, **own}

    def asks(self, limits: Limits, prompts_max: int) -> list[Ask]:
        given = self.max_completion_tokens
        limit = self.max_tokens if given is None else given
        options: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            # The others are in another field.
            check_option("reasoning_effort", "reasoning_effort", limits)
            options["reasoning_effort"] = self.reasoning_effort
        tooling = self._tooling(limits)
        prompt = chat_prompt(self.messages, options | (self.chat_template_kwargs or {}))
        prompt = replace(prompt, tools=tooling.told)
        ask = self.ask(prompt, limits, logprobs=self._logprobs(), max_tokens=limit)
        if grammar := tooling.grammar:
            self._check_alone(ask)
            ask.sampling.structured_outputs.grammar = grammar
        shows = ask.show_special_tokens or tooling.shows_markers
        return [replace(ask, stop=(*ask.stop, *tooling.stops), show_special_tokens=shows)]

    def reading(self, limits: Limits) -> Reading | None:
        tooling, formats = self._tooling(limits), limits.answers
        if not tooling.is_used and formats.reasoning is None:
            return None
        hides = tooling.shows_markers and self.skip_special_tokens is not False
        return Reading(formats=formats, has_tools=tooling.is_used, hides_others=hides)

    def _tooling(self, limits: Limits) -> Tooling:
        is_parallel = self.parallel_tool_calls is not False
        return Tooling(self.tools or (), self.tool_choice, limits.answers, is_parallel=is_parallel)

    def _check_alone(self, ask: Ask) -> None:
        """An answer that must be calls cannot be something else too."""
        if ask.sampling.HasField("structured_outputs"):
            rule = "must be auto or none together with response_format or structured_outputs"
            raise InvalidRequest("tool_choice", rule)
        for name in structured_outputs.EXCLUDED:
            if getattr(ask.sampling, name):
                raise InvalidRequest("tool_choice", f"must be auto or none together with {name}")

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        return None


def _told(field: str, calls: Iterable[ToolCallBody]) -> tuple[dict[str, Any], ...]:
    return tuple(each.told(f"{field}[{index}]") for index, each in enumerate(calls))


def chat_prompt(
    messages: Iterable[ChatMessageBody], options: Mapping[str, object] | None
) -> ChatPrompt:
    """ "developer" is OpenAI's newer word for what templates call "system"."""
    turns = tuple(
        Message(
            role="system" if each.role == "developer" else each.role,
            content=each.text(),
            name=each.name or "",
            tool_calls=_told(f"messages[{index}].tool_calls", each.tool_calls or ()),
            tool_call_id=each.tool_call_id or "",
            reasoning=each.reasoning_content or "",
        )
        for index, each in enumerate(messages)
    )
    return ChatPrompt(messages=turns, options=tuple((options or {}).items()))


OPERATIONS: Final = (generating("/v1/chat/completions", "chat", ChatReply, ChatBody, ChatChunk),)
