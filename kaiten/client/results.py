"""What the client hands out: values, no protobuf messages."""

from dataclasses import dataclass
from typing import Final, Literal

from kaiten.client.errors import InternalServerError
from kaiten.v1 import common_pb2, inference_service_pb2

FinishReason = Literal["stop", "length", "cancelled", "deadline_exceeded", "error"]

REASONS: Final[dict[int, FinishReason]] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    common_pb2.FINISH_REASON_DEADLINE_EXCEEDED: "deadline_exceeded",
    common_pb2.FINISH_REASON_ERROR: "error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """At one position: of the sampled token, and of the likeliest ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The prompt's own log-probabilities."""

    token_ids: tuple[int, ...]
    # Of all tokens but the first: nothing comes before it.
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallDelta:
    """A part of a call. Of the `index`-th call of its choice the first part has id and name."""

    index: int
    id: str = ""
    name: str = ""
    # The next characters of the arguments' JSON.
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """`arguments`: JSON as the model wrote it; what it broke off is broken off here."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New output of one choice: tokens [position, position + token_count).

    With `parse_output` the text is of the answer alone.
    """

    choice: int
    position: int
    token_count: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished sample. An output with tool calls ends by `stop`, too."""

    text: str
    finish_reason: FinishReason
    output_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    # With finish_reason "error" only.
    error: str = ""
    # With that: sent again, under another id, it may be served.
    is_retryable: bool = False
    # With that: what the request asks of its output left it no token.
    is_unsatisfiable: bool = False
    # With `parse_output` only.
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, object]:
        """As a turn of `messages`."""
        turn: dict[str, object] = {"role": "assistant", "content": self.text}
        return turn | {"reasoning": self.reasoning, "tool_calls": self.tool_calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    # Of the output tokens; with `parse_output` only.
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time went, on the scheduler's clock."""

    queue_us: int
    prefill_us: int
    decode_us: int
    preemptions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    # With `prompt_logprobs` only.
    prompt: Prompt | None = None

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Of the first choice."""
        return self.choices[0].tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """What `get` sees. `finish_reasons`, one per choice, is empty while the request lives."""

    request_id: str
    is_finished: bool
    # While it waits: 1 is next; and what it waits for, in words.
    queue_position: int | None = None
    queue_reason: str = ""
    finish_reasons: tuple[FinishReason, ...] = ()
    usage: Usage | None = None
    timings: Timings | None = None


def reason_from_proto(number: int) -> FinishReason:
    """InternalServerError for a reason that came after this client."""
    if number not in REASONS:
        raise InternalServerError(f"finish reason {number} is unknown: this client is too old")
    return REASONS[number]


def delta_from_proto(message: inference_service_pb2.Delta) -> Delta:
    return Delta(
        choice=message.choice,
        position=message.position,
        token_count=message.token_count,
        text=message.text,
        token_ids=tuple(message.token_ids),
        # Most deltas have neither; making an empty tuple of nothing costs more than the rest.
        logprobs=_logprobs(message) if message.logprobs else (),
        reasoning=message.reasoning,
        tool_calls=_parts_of_calls(message) if message.tool_calls else (),
    )


def _logprobs(message: inference_service_pb2.Delta) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            logprob=each.logprob,
            top=tuple(zip(each.top_token_ids, each.top_logprobs, strict=True)),
        )
        for each in message.logprobs
    )


def _parts_of_calls(message: inference_service_pb2.Delta) -> tuple[ToolCallDelta, ...]:
    return tuple(
        ToolCallDelta(index=each.index, id=each.id, name=each.name, arguments=each.arguments)
        for each in message.tool_calls
    )


def prompt_from_proto(message: inference_service_pb2.PromptWithLogprobs) -> Prompt:
    told = message.logprobs
    k = len(told.top_token_ids) // max(1, told.token_count)
    tops = list(zip(told.top_token_ids, told.top_logprobs, strict=True))
    return Prompt(
        token_ids=tuple(message.token_ids),
        logprobs=tuple(
            TokenLogprobs(logprob=logprob, top=tuple(tops[index * k : (index + 1) * k]))
            for index, logprob in enumerate(told.logprobs)
        ),
    )


def usage_from_proto(message: inference_service_pb2.Usage) -> Usage:
    return Usage(
        prompt_tokens=message.prompt_tokens,
        output_tokens=message.output_tokens,
        cached_tokens=message.cached_tokens,
        reasoning_tokens=message.reasoning_tokens,
    )


def timings_from_proto(message: inference_service_pb2.Timings) -> Timings:
    return Timings(
        queue_us=message.queue_us,
        prefill_us=message.prefill_us,
        decode_us=message.decode_us,
        preemptions=message.preemptions,
    )


def status_from_proto(message: inference_service_pb2.GetRequestResponse) -> RequestStatus:
    if message.state != inference_service_pb2.REQUEST_STATE_FINISHED:
        return RequestStatus(
            request_id=message.request_id,
            is_finished=False,
            queue_position=message.queue_position if message.HasField("queue_position") else None,
            queue_reason=message.queue_reason,
        )
    return RequestStatus(
        request_id=message.request_id,
        is_finished=True,
        finish_reasons=tuple(reason_from_proto(choice.reason) for choice in message.choices),
        usage=usage_from_proto(message.done.usage),
        timings=timings_from_proto(message.done.timings),
    )
