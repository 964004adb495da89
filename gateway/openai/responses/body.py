"""What POST /v1/responses reads: text in, and settings to sample by."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from gateway.openai.fields.structured_outputs import ResponseTextFormat
from gateway.openai.generation_body import SamplingBody
from gateway.openai.request_body import FAIL_FAST, RequestBody, check_metadata
from gateway.requests.validation import Limits, check_option
from gateway.values.generation_request import Ask, ChatPrompt, Message
from service_kit.errors import InvalidRequest

LOGPROBS_INCLUDED: Final = "message.output_text.logprobs"


class InputText(RequestBody):
    """A part of a content. What a part of an answer has besides may be there if it says nothing."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(RequestBody):
    """A turn, also as an answer has it: then `id` and `status` say nothing."""

    type: Literal["message"] = "message"
    role: str
    content: str | Annotated[list[InputText], FAIL_FAST]
    id: str | None = None
    status: str | None = None
    phase: None = None

    def message(self) -> Message:
        """ "developer" is OpenAI's newer word for what templates call "system"."""
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        return Message(role="system" if self.role == "developer" else self.role, content=text)


class TextConfig(RequestBody):
    format: ResponseTextFormat | None = None
    verbosity: None = None


class Reasoning(RequestBody):
    effort: str | None = None
    """For chat templates that ask for it."""
    summary: None = None


class ResponseStreamOptions(RequestBody):
    include_obfuscation: bool = False


class ResponseBody(SamplingBody):
    """POST /v1/responses."""

    identity: ClassVar[bytes] = b"resp_"

    input: str | Annotated[list[InputMessage], FAIL_FAST]
    """A user's text, or turns that the model's chat template takes."""
    instructions: str | None = None
    """A system message before all others. Of `previous_response_id` they are not taken over."""
    previous_response_id: str | None = None
    """Go on with that conversation: what it was asked and answered comes before `input`. For as
    long as it is kept."""
    max_output_tokens: int | None = None
    """With the prompt's tokens at most the context. Left out: to its end."""
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: int | None = None
    """Needs include."""
    metadata: dict[str, str] | None = None
    """Yours: told again with the response. At most 16 of 64 and 512 characters."""
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    """Keep computing when the client leaves; come back by GET /v1/responses/{id}."""
    store: bool | None = None
    """false: nobody finds it later. Left out: true."""
    truncation: Literal["disabled"] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None

    @property
    def output_format(self) -> tuple[str, ResponseTextFormat | None]:
        return "text.format", None if self.text is None else self.text.format

    @property
    def aliases(self) -> Mapping[str, str]:
        return {
            **super().aliases,
            "conversation.messages": "input",
            "sampling.logprobs": "top_logprobs",
            "sampling.max_tokens": "max_output_tokens",
        }

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS_INCLUDED in (self.include or ())

    def turns(self) -> Iterator[Message]:
        """Those of `input`."""
        if isinstance(self.input, str):
            yield Message(role="user", content=self.input)
        else:
            yield from (each.message() for each in self.input)

    def response_ask(self, turns: Sequence[Message], limits: Limits) -> Ask:
        """`turns`: all of them, but for the instructions."""
        self._check()
        options: dict[str, Any] = {}
        if self.reasoning is not None and self.reasoning.effort is not None:
            check_option("reasoning.effort", "reasoning_effort", limits)
            options["reasoning_effort"] = self.reasoning.effort
        if self.instructions is not None:
            turns = [Message(role="system", content=self.instructions), *turns]
        prompt = ChatPrompt(messages=tuple(turns), options=tuple(options.items()))
        logprobs = (self.top_logprobs or 0) if self.with_logprobs else None
        return self.ask(prompt, limits, logprobs=logprobs, max_tokens=self.max_output_tokens)

    def _check(self) -> None:
        """What depends on two fields, and what is bounded only here."""
        if self.top_logprobs and not self.with_logprobs:
            raise InvalidRequest("top_logprobs", f"needs include to have {LOGPROBS_INCLUDED!r}")
        if self.background and not self.is_stored:
            raise InvalidRequest("background", "needs store: nobody could come back for it")
        if self.max_output_tokens == 0:
            raise InvalidRequest("max_output_tokens", "must be at least 1, got 0")
        check_metadata(self.metadata)
