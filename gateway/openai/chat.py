"""/v1/chat/completions: what it reads, and what it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import UNSET, Struct, UnsetType
from pydantic import Discriminator, Tag

from gateway.openai.fields.tools import (
    AllowedChoice,
    Choice,
    Chosen,
    FunctionDelta,
    FunctionReply,
    NamedChoice,
    ToolCallDelta,
    ToolCallReply,
    ToolCalls,
    Tools,
    calling,
    tools_of,
)
from gateway.openai.generate import generating
from gateway.openai.generation_body import GenerationBody
from gateway.openai.logprobs import PromptLogprobs, TokenLogprob
from gateway.openai.parts import Chunk, Fields, Format, Head, Part, Reason, TokenIds
from gateway.openai.request_body import FAIL_FAST, Options, RequestBody
from gateway.openai.usage import Count, Timing, Usage
from gateway.requests.validation import Limits, check_option
from gateway.text.tools.flat import Call
from gateway.values import request_ids
from gateway.values.generation_request import ChatPrompt, GenerationRequest, Message
from service_kit.errors import InvalidRequest

ChatReason = Reason | Literal["tool_calls"]


class ChatTopLogprob(Struct):
    token: str
    logprob: float | None
    bytes: list[Count]


class ChatTokenLogprob(ChatTopLogprob):
    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatTokenLogprob]
    refusal: None = None


class ChatMessage(Struct, kw_only=True):
    """`content` is null where there are only calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    refusal: None = None
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


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
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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
    delta = ChatDelta() if reason else _delta(part)
    if part.is_first:
        delta = ChatDelta(role="assistant", content="")
    return ChatChunkChoice(part.choice, delta, logprobs, reason, part.token_ids)


def _delta(part: Part) -> ChatDelta:
    is_content = part.text or not (part.reasoning or part.calls)
    return ChatDelta(
        content=part.text if is_content else UNSET,
        reasoning_content=part.reasoning or UNSET,
        tool_calls=[_call_delta(call) for call in part.calls] or UNSET,
    )


def _call_delta(call: Call) -> ToolCallDelta:
    if not call.id:
        return ToolCallDelta(index=call.number, function=FunctionDelta(arguments=call.arguments))
    function = FunctionDelta(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.number, id=call.id, type="function", function=function)


def _choice(part: Part) -> ChatChoice:
    calls = [
        ToolCallReply(call.id, FunctionReply(call.name, call.arguments)) for call in part.calls
    ]
    message = ChatMessage(
        content=None if calls and not part.text else part.text,
        reasoning_content=part.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
    logprobs = _logprobs(part.logprobs)
    return ChatChoice(part.choice, message, logprobs, _reason(part), part.token_ids)


def _reason(part: Part) -> ChatReason | None:
    """Whoever calls has something to wait for, unless it was cut off, or had to call just that."""
    return "tool_calls" if part.reason == "stop" and part.has_calls else part.reason


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


CHAT: Final = Format(request_ids.CHAT, ChatChunk, _chunk_choice, _reply)


class TextPart(RequestBody):
    """One part of a content that is a list."""

    type: Literal["text"]
    text: str


class RefusalPart(RequestBody):
    """Of what an assistant said: text as well."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


def _part_kind(part: Any) -> str:
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return "RefusalPart" if is_refusal else "TextPart"


ContentPart = Annotated[
    Annotated[TextPart, Tag("TextPart")] | Annotated[RefusalPart, Tag("RefusalPart")],
    Discriminator(_part_kind),
]


class ChatMessageBody(RequestBody):
    """A turn. Keys that only matter for tools or display may be there if they say nothing."""

    role: str
    content: str | Annotated[list[ContentPart], FAIL_FAST] | None = None
    name: str | None = None
    """Who of that role speaks, for chat templates that show it."""
    reasoning_content: str | None = None
    """As answers have it, for chat templates that show it."""
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None
    """Of a tool's answer: which call it answers."""
    refusal: str | None = None
    """What an assistant said in place of a content: text as well."""
    function_call: None = None
    audio: None = None
    annotations: list[Any] | None = None
    parsed: Any = None
    """What the SDKs' `parse` made of the content."""

    def text(self) -> str | None:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or (None if self.tool_calls else "")

    def message(self) -> Message:
        """ "developer" is OpenAI's newer word for what templates call "system"."""
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=self.text(),
            name=self.name or "",
            reasoning=self.reasoning_content or "",
            tool_calls=tuple(each.call() for each in self.tool_calls or ()),
            tool_call_id=self.tool_call_id or "",
        )


class ConversationBody(RequestBody):
    """What a chat's prompt is made of, beside its messages."""

    chat_template_kwargs: Options | None = None
    tools: Tools | None = None
    """At most 128, for models whose chat template knows tools."""
    add_generation_prompt: bool | None = None
    """false: the prompt does not end with the beginning of the assistant's turn."""
    continue_final_message: bool | None = None
    """true: the prompt ends with the last message's content, which the output goes on with. Not
    with add_generation_prompt: true."""

    def chat_prompt(
        self, messages: Sequence[ChatMessageBody], options: Mapping[str, object] | None = None
    ) -> ChatPrompt:
        turns = tuple(each.message() for each in messages)
        goes_on = self.continue_final_message is True
        if goes_on and self.add_generation_prompt:
            rule = "must not be given with add_generation_prompt: true"
            raise InvalidRequest("continue_final_message", rule)
        if goes_on and not (turns and turns[-1].content and not turns[-1].tool_calls):
            rule = "needs a last message that has a content and no tool_calls"
            raise InvalidRequest("continue_final_message", rule)
        return ChatPrompt(
            messages=turns,
            options=tuple({**(options or {}), **(self.chat_template_kwargs or {})}.items()),
            tools=tools_of(each.function for each in self.tools or ()),
            opens_turn=self.add_generation_prompt is not False,
            goes_on=goes_on,
        )


class ChatBody(GenerationBody, ConversationBody):
    """POST /v1/chat/completions."""

    FORMAT = CHAT
    identity = CHAT.id_prefix.encode()
    hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("input", "prompt"), "here it is messages"),
        **dict.fromkeys(
            ("background", "include", "previous_response_id", "reasoning", "truncation"),
            "it is for POST /v1/responses",
        ),
        "instructions": "here it is a message of the role system",
        "max_output_tokens": "here it is max_completion_tokens",
        "text": "here it is response_format",
    }

    messages: Annotated[list[ChatMessageBody], FAIL_FAST]
    """What the model's chat template takes; together they leave room for an output token. Texts
    are bounded in bytes of UTF-8, all of them together."""
    max_completion_tokens: int | None = None
    """As max_tokens, which is not looked at where this is given."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Needs logprobs."""
    reasoning_effort: str | None = None
    """For chat templates that ask for it. chat_template_kwargs may say another."""
    tool_choice: Choice | NamedChoice | AllowedChoice | None = None
    """none: the model is not told of tools. required, one by its name, or some of them: workers
    must be able to keep to a grammar. Left out: auto."""
    parallel_tool_calls: bool | None = None
    """false: one call at most, with which the output ends."""

    @property
    def aliases(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        own = {"sampling.logprobs": "top_logprobs", "sampling.max_tokens": limit}
        return {**super().aliases, **own}

    def requests(self, limits: Limits, prompts_max: int) -> list[GenerationRequest]:
        given = self.max_completion_tokens
        limit = self.max_tokens if given is None else given
        options: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            # The others are in another field.
            check_option("reasoning_effort", "reasoning_effort", limits)
            options["reasoning_effort"] = self.reasoning_effort
        prompt = self.chat_prompt(self.messages, options)
        request = self.request(
            replace(prompt, tools=()) if self.tool_choice == "none" else prompt,
            limits,
            logprobs=self._logprobs(),
            max_tokens=limit,
        )
        is_single = self.parallel_tool_calls is False
        read = replace(request, is_read=True, is_single_call=is_single)
        return [calling(read, prompt.tools, self._chosen)]

    @property
    def _chosen(self) -> Chosen:
        match self.tool_choice:
            case NamedChoice(function=function):
                return Chosen("required", [function.name])
            case AllowedChoice(allowed_tools=allowed):
                names = [each.function.name for each in allowed.tools]
                return Chosen(allowed.mode, names, "tool_choice.allowed_tools.tools")
            case choice:
                return Chosen(choice or "auto")

    @property
    def names_call(self) -> bool:
        return isinstance(self.tool_choice, NamedChoice)

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        return None


OPERATIONS: Final = (generating("/v1/chat/completions", "chat", ChatReply, ChatBody, ChatChunk),)
