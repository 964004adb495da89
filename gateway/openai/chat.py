"""/v1/chat/completions: what it reads, and what it answers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType

from gateway.openai.generate import generating
from gateway.openai.generation_body import GenerationBody
from gateway.openai.logprobs import PromptLogprobs, TokenLogprob
from gateway.openai.parts import Chunk, Fields, Format, Head, Part, Reason, TokenIds
from gateway.openai.request_body import FAIL_FAST, Options, RequestBody
from gateway.openai.usage import Count, Timing, Usage
from gateway.requests.validation import Limits, check_option
from gateway.values.generation_request import Ask, ChatPrompt, Message
from service_kit.errors import InvalidRequest


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
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(Struct):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
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


class ChatChunkChoice(Struct):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: Reason | None
    token_ids: TokenIds | UnsetType = UNSET


class ChatChunk(Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


def _chunk_choice(part: Part) -> ChatChunkChoice:
    reason, logprobs = part.reason, _logprobs(part.logprobs)
    delta = ChatDelta() if reason else ChatDelta(content=part.text)
    if part.is_first:
        delta = ChatDelta(role="assistant", content="")
    return ChatChunkChoice(part.choice, delta, logprobs, reason, part.token_ids)


def _choice(part: Part) -> ChatChoice:
    message, logprobs = ChatMessage(content=part.text), _logprobs(part.logprobs)
    return ChatChoice(part.choice, message, logprobs, part.reason, part.token_ids)


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
    """A turn. Keys that only matter for tools or display may be there if they say nothing."""

    role: str
    content: str | Annotated[list[TextPart], FAIL_FAST] | None = None
    name: str | None = None
    """Who of that role speaks, for chat templates that show it."""
    refusal: None = None
    tool_calls: None = None
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
        prompt = chat_prompt(self.messages, options | (self.chat_template_kwargs or {}))
        return [self.ask(prompt, limits, logprobs=self._logprobs(), max_tokens=limit)]

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        return None


def chat_prompt(
    messages: Iterable[ChatMessageBody], options: Mapping[str, object] | None
) -> ChatPrompt:
    """ "developer" is OpenAI's newer word for what templates call "system"."""
    turns = tuple(
        Message(
            role="system" if each.role == "developer" else each.role,
            content=each.text(),
            name=each.name or "",
        )
        for each in messages
    )
    return ChatPrompt(messages=turns, options=tuple((options or {}).items()))


OPERATIONS: Final = (generating("/v1/chat/completions", "chat", ChatReply, ChatBody, ChatChunk),)
