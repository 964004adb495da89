"""OpenAI-style bodies: what is read, what is harmless, what is refused; and their way to an Ask.

Types are strict (a string is no number) but ranges are left to `validation`, which both protocols
share. A key nobody knows is refused as OpenAI does it: a misspelt `max_token` must not be ignored.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gateway.http.json_body import JsonBody, cut, validated
from gateway.openai.unknown_fields import Ignored
from gateway.requests.validation import Limits, TooMany, sampling_from
from gateway.values.generation_request import (
    Ask,
    ChatPrompt,
    Message,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from kaiten.v1.common_pb2 import SamplingParams
from service_kit.errors import InvalidRequest

# Sent by clients for OpenAI's own bookkeeping; they change no output.
HARMLESS: Final = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
)
# Known to OpenAI's API, not to this one yet: accepted only with a value that asks for nothing.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}
SAMPLING_FIELDS: Final = tuple(SamplingParams.DESCRIPTOR.fields_by_name)
SEED_MIN: Final = -(2**63)
# Of a completion that says no max_tokens, as OpenAI and vLLM have it: a base model never stops.
COMPLETION_TOKENS: Final = 16
# Few enough digits that one string has one meaning and none costs time.
TOKEN_ID: Final = re.compile(r"0|-?[1-9][0-9]{0,18}", re.ASCII)


# More entries than any object of ours may have: pydantic tells each wrong one.
ENTRIES_MAX: Final = 1024


def _few(value: object, info: ValidationInfo) -> object:
    if isinstance(value, dict) and len(value) > ENTRIES_MAX:
        raise TooMany(str(info.field_name), ENTRIES_MAX, len(value), "entries")
    return value


# Of a list or an object with a million mistakes the first is enough.
_FIRST: Final = Field(fail_fast=True)
_Texts = Annotated[list[str], _FIRST]
_Ids = Annotated[list[int], _FIRST]
_IdLists = Annotated[list[_Ids], _FIRST]
_Options = Annotated[dict[str, bool | int | str | None], BeforeValidator(_few)]
_Biases = Annotated[dict[str, float], BeforeValidator(_few)]


class _Body(BaseModel):
    # Docstrings of fields are their descriptions in the OpenAPI document.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, content: object, info: ValidationInfo) -> object:
        """The first key that nobody knows: left to itself pydantic tells them all.

        With a place to note them (`Ignored`) they are left out.
        """
        if not isinstance(content, dict) or content.keys() <= cls.model_fields.keys():
            return content
        unknown = (key for key in content if key not in cls.model_fields)
        if info.context is None:
            raise PydanticCustomError("unknown", "is not a known field", {"key": next(unknown)})
        for key in unknown:
            info.context.add(key)
        return {key: value for key, value in content.items() if key in cls.model_fields}

    @property
    def words(self) -> Mapping[str, str]:
        """What this body calls the fields of an Ask, where it is not what most bodies call them."""
        return {}


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    include_position: bool = False
    """Ours: how many tokens of the choice there are so far, for `starting_after`."""


class Common(_Body):
    """What both endpoints take, vendor extras included."""

    model: str | None = None
    """Left out or empty: the only model. Another one is answered with 404."""
    n: int | None = None
    temperature: float | None = None
    prompt_logprobs: int | None = None
    """As in vLLM: of the prompt's tokens, with this many likeliest ones. Not told in streams, and
    bounded in all: prompt tokens times (prompt_logprobs + 1)."""
    top_p: float | None = None
    top_k: int | None = None
    """0 or -1: all."""
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    """With the prompt's tokens at most the context. Left out: to its end. 0 scores a prompt whose
    log-probabilities are asked for."""
    min_tokens: int | None = None
    """At most max_tokens."""
    stop: str | _Texts | None = None
    stop_token_ids: _Ids | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: _Biases | None = None
    """By token id, as a string: JSON has no other keys."""
    allowed_token_ids: _Ids | None = None
    """Empty: all. One must be left by bad_words_token_ids of one token and, with min_tokens, by
    the tokens that stop."""
    bad_words_token_ids: _IdLists | None = None
    """Something of the vocabulary must be left."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: int | None = None
    """As other servers have it: lower runs first. A tenant may have a bound of its own."""
    background: bool | None = None
    """Keep computing when the client leaves; come back by GET /v1/requests/{id}. With a single
    prompt only."""

    def ask(
        self,
        prompt: Prompt,
        body_hash: bytes,
        request_id: str,
        given: dict[str, Any],
        limits: Limits,
    ) -> Ask:
        """What both endpoints ask alike. `given`: sampling fields that they read in their ways."""
        if self.prompt_logprobs is not None and self.is_streaming:
            rule = "is not told in streams; leave stream out, or take echo with logprobs"
            raise InvalidRequest("prompt_logprobs", rule)
        sampling, wrong = sampling_from(self._sampling() | given, limits)
        return Ask(
            prompt=prompt,
            body_hash=body_hash,
            request_id=request_id,
            model=self.model or "",
            sampling=sampling,
            sampling_wrong=wrong,
            n=self.n,
            stop=self.stops,
            return_token_ids=bool(self.return_token_ids),
            keep_running=bool(self.background),
            include_stop=bool(self.include_stop_str_in_output),
            show_special_tokens=self.skip_special_tokens is False,
            priority=-(self.priority or 0),
        )

    def _sampling(self) -> dict[str, Any]:
        """Fields that are called as in SamplingParams, and those that mean one of them."""
        given = {name: getattr(self, name) for name in SAMPLING_FIELDS if hasattr(self, name)}
        # -1 means "all" to other servers' clients.
        given["top_k"] = 0 if self.top_k == -1 else self.top_k
        # OpenAI's seed is a signed 64-bit number: the negative ones are the upper half of ours.
        if self.seed is not None and SEED_MIN <= self.seed < 0:
            given["seed"] = self.seed + 2**64
        given["logit_bias"] = _biases(self.logit_bias or {})
        given["bad_words"] = self.bad_words_token_ids
        return given

    @property
    def is_streaming(self) -> bool:
        return bool(self.stream)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_position(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_position

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class CompletionBody(Common):
    """POST /v1/completions."""

    PROMPT_FIELD: ClassVar[str] = "prompt"
    prompt: str | _Ids | _Texts | _IdLists
    """Must become at least one token, which an empty text does only where the tokenizer adds one,
    and leave room for an output token. Texts are bounded in bytes of UTF-8."""
    max_tokens: int | None = None
    """With the prompt's tokens at most the context. Left out: 16, or fewer where the context ends
    before. 0 scores a prompt whose log-probabilities are asked for."""
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    """Only what n is."""

    def asks(
        self, body_hash: bytes, request_id: str, limits: Limits, prompts_max: int
    ) -> list[Ask]:
        """One Ask per prompt."""
        prompts = _prompts(self.prompt)
        if not prompts:
            raise InvalidRequest("prompt", "must not be empty")
        if len(prompts) > prompts_max:
            raise TooMany("prompt", prompts_max, len(prompts), "prompts")
        if len(prompts) > 1 and request_id:
            raise InvalidRequest("Idempotency-Key", "works with a single prompt only")
        if len(prompts) > 1 and self.background:
            raise InvalidRequest("background", "works with a single prompt only")
        self._check_choosing()
        echoed, asked = self.echoed_logprobs, self.prompt_logprobs
        # A negative one stays, to be refused.
        is_more = echoed is not None and (asked is None or 0 <= asked < echoed)
        given = {"prompt_logprobs": echoed} if is_more else {}
        asks = [self.ask(each, body_hash, request_id, given, limits) for each in prompts]
        return [replace(ask, default_max_tokens=COMPLETION_TOKENS) for ask in asks]

    @property
    def echoed_logprobs(self) -> int | None:
        """Likeliest tokens beside each of the prompt's own, where it comes before the text."""
        return self.logprobs if self.echo else None

    def _check_choosing(self) -> None:
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            rule = f"must be at least n, which is {n}, got {self.best_of}"
            raise InvalidRequest("best_of", rule)
        if self.best_of is not None and self.best_of > n:
            rule = "larger than n is not supported; ask for n with logprobs and choose yourself"
            raise InvalidRequest("best_of", rule)


class TextPart(_Body):
    """One part of a content that is a list."""

    type: Literal["text"]
    text: str


class ChatMessageBody(_Body):
    """A turn. Keys that only matter for tools or display may be there if they say nothing."""

    role: str
    content: str | Annotated[list[TextPart], _FIRST] | None = None
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


class ChatBody(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessageBody], _FIRST] = Field()
    """What the model's chat template takes; together they leave room for an output token. Texts
    are bounded in bytes of UTF-8, all of them together."""
    max_completion_tokens: int | None = None
    """As max_tokens, which is not looked at where this is given."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Needs logprobs."""
    reasoning_effort: str | None = None
    """For chat templates that ask for it. chat_template_kwargs may say another."""
    chat_template_kwargs: _Options | None = None

    @property
    def words(self) -> Mapping[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"sampling.logprobs": "top_logprobs", "sampling.max_tokens": limit}

    def asks(
        self, body_hash: bytes, request_id: str, limits: Limits, prompts_max: int
    ) -> list[Ask]:
        """The one Ask."""
        messages = _messages(self.messages)
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        effort = self.reasoning_effort
        options: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
        options |= self.chat_template_kwargs or {}
        prompt = ChatPrompt(messages=messages, options=_options(options))
        given = {"logprobs": self._logprobs(), "max_tokens": limit}
        return [self.ask(prompt, body_hash, request_id, given, limits)]

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise InvalidRequest("top_logprobs", "needs logprobs to be true")
        return None


class TokenizeBody(_Body):
    """POST /tokenize: what a prompt becomes."""

    PROMPT_FIELD: ClassVar[str] = "prompt"
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessageBody], _FIRST] | None = None
    chat_template_kwargs: _Options | None = None

    def ask(self) -> Ask:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "give either prompt or messages")
        if self.messages is None and self.chat_template_kwargs:
            raise InvalidRequest("chat_template_kwargs", "needs messages")
        prompt: Prompt = TextPrompt(text=self.prompt or "")
        if self.messages is not None:
            options = _options(self.chat_template_kwargs)
            prompt = ChatPrompt(messages=_messages(self.messages), options=options)
        return Ask(prompt=prompt, body_hash=b"", model=self.model or "")


class DetokenizeBody(_Body):
    """POST /detokenize: the text of token ids."""

    model: str | None = None
    tokens: _Ids
    skip_special_tokens: bool = True

    @property
    def words(self) -> Mapping[str, str]:
        return {"token_ids.ids": "tokens"}

    def ask(self) -> Ask:
        return Ask(
            prompt=TokenPrompt(token_ids=tuple(self.tokens)),
            body_hash=b"",
            model=self.model or "",
            show_special_tokens=not self.skip_special_tokens,
        )


BodyT = TypeVar("BodyT", bound=_Body)


@contextmanager
def spoken_as(body: _Body) -> Iterator[None]:
    """Complaints about an Ask come out in the words of the body that it was made of."""
    try:
        yield
    except InvalidRequest as error:
        for each in (error, *error.violations):
            each.field = body.words.get(each.field, each.field)
        raise


def parse(kind: type[BodyT], body: JsonBody, ignored: Ignored | None = None) -> BodyT:
    """A request body, whose bytes are given up. InvalidRequest names the first wrong field.

    `ignored` notes those that nobody knows; None: the first of them is wrong.
    """
    return validated(kind, _without_neutral(body.take()), ignored)


def _without_neutral(content: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in content.items():
        if key in NEUTRAL:
            # By type too: Python has 1 == True, JSON has not.
            if not any(type(value) is type(each) and value == each for each in NEUTRAL[key]):
                raise InvalidRequest(key, "is not supported by this server")
        elif key not in HARMLESS:
            kept[key] = value
    return kept


def _messages(items: "Sequence[ChatMessageBody]") -> tuple[Message, ...]:
    """ "developer" is OpenAI's newer word for what templates call "system"."""
    return tuple(
        Message(
            role="system" if item.role == "developer" else item.role,
            content=item.text(),
            name=item.name or "",
        )
        for item in items
    )


def _options(given: Mapping[str, Any] | None) -> tuple[tuple[str, object], ...]:
    return tuple((given or {}).items())


def _biases(biases: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    wrong = next((key for key in biases if not TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise InvalidRequest("logit_bias", f"keys must be token ids, got {cut(wrong)!r}")
    return tuple((int(key), bias) for key, bias in biases.items())


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [TextPrompt(text=prompt)]
    if prompt and isinstance(prompt[0], int):
        return [TokenPrompt(token_ids=tuple(prompt))]
    return [
        TextPrompt(text=item) if isinstance(item, str) else TokenPrompt(token_ids=tuple(item))  # type: ignore[arg-type]
        for item in prompt
    ]
