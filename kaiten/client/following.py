"""Follow one request over any number of connections: decisions only, no I/O.

The sync and the async client feed it events and failures; it says what is new, which call comes
next and how long to wait before it. Positions make resuming exact: what was received is never
handed out again, and a hole is an error, never silence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from kaiten.client.errors import (
    ApiError,
    DeadlineExceededError,
    InternalServerError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from kaiten.client.results import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    delta_from_proto,
    prompt_from_proto,
    reason_from_proto,
    timings_from_proto,
    usage_from_proto,
)
from kaiten.v1 import common_pb2
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.waits import doubled_s

WAIT_S_MIN: Final = 0.05
WAIT_S_MAX: Final = 2.0
NOT_NOW: Final = (UnavailableError, RequestCancelledError, OverloadedError)


@dataclass(slots=True, eq=False)
class _ChoiceSoFar:
    """What one choice has received: `position` tokens."""

    position: int = 0
    # It has its last text, which has no token.
    has_rest: bool = False
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    # By their index.
    calls: dict[int, list[ToolCallDelta]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reason: FinishReason | None = None
    output_tokens: int = 0
    error: str = ""
    is_retryable: bool = False
    is_unsatisfiable: bool = False


class Following:
    """The state of one request as its client knows it."""

    def __init__(
        self,
        *,
        generate: pb.GenerateRequest | None = None,
        attach: pb.AttachRequest | None = None,
        resume_s: float,
        overload_s: float = 0.0,
    ) -> None:
        assert (generate is None) != (attach is None), "follow a new request or an old one"
        self._generate = generate
        first = generate if generate is not None else attach
        assert first is not None
        self.request_id: str = first.request_id
        self._return_token_ids = first.return_token_ids
        self._keep_running = first.keep_running
        self._resume_s = resume_s
        self._overload_s = overload_s
        self._choices: dict[int, _ChoiceSoFar] = {}
        if attach is not None:
            for choice, position in enumerate(attach.positions):
                self._choice(choice).position = position
        self._is_accepted = attach is not None
        self._prompt: pb.PromptWithLogprobs | None = None
        self._done: pb.Done | None = None
        self._failures = 0
        self._lost_at_s: float | None = None
        # Between calls, since the last progress.
        self._waited_s = 0.0
        # A connection broke, and whoever was at its other end may live.
        self._was_cut = False
        self._refused_at_s: float | None = None

    def __repr__(self) -> str:
        positions = [self._choice(index).position for index in range(len(self._choices))]
        return f"Following({self.request_id}, positions={positions}, done={self.is_done})"

    @property
    def is_accepted(self) -> bool:
        """The service has it, and will not lose it."""
        return self._is_accepted

    @property
    def is_done(self) -> bool:
        return self._done is not None

    def next_call(self) -> pb.GenerateRequest | pb.AttachRequest:
        """The request to (re)open the stream with. Before Accepted the first one is repeated."""
        if not self._is_accepted:
            assert self._generate is not None
            return self._generate
        count = max(self._choices, default=-1) + 1
        return pb.AttachRequest(
            request_id=self.request_id,
            positions=[self._choice(index).position for index in range(count)],
            return_token_ids=self._return_token_ids,
            keep_running=self._keep_running,
        )

    def feed(self, event: pb.GenerationEvent) -> Delta | None:
        """Take one event. The new output in it, or None."""
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self._is_accepted = True
            # Who takes us has been found: until it has output for us may be long.
            self._lost_at_s = None
            return None
        if kind == "delta":
            delta = self._on_delta(delta_from_proto(event.delta))
            if delta is not None:
                self._progressed()
            return delta
        if kind == "prompt":
            # Whoever attaches from the beginning is told again, the same.
            self._prompt = event.prompt
        elif kind == "finished":
            self._on_finished(event.finished)
        elif kind == "done":
            self._done = event.done
        return None

    def _progressed(self) -> None:
        """What is told again is no progress: a gateway that takes and drops us may not hold us."""
        self._failures, self._lost_at_s, self._waited_s = 0, None, 0.0

    def wait_s_after(self, error: ApiError | None, *, now_s: float) -> float:
        """The stream broke (`error`) or just ended (None): how long to wait before the next call.

        Raises the error when another call is no use or has been tried for `resume_s`. A
        cancellation that we did not ask for is a server going away: a request ends by an event.
        """
        named_s = 0.0 if error is None else error.retry_after_s or 0.0
        if isinstance(error, OverloadedError):
            # Who has lost a gateway looks for another, and for one that has room.
            if not self._is_accepted or self._lost_at_s is None:
                return self._wait_s_for_room(error, now_s)
        elif error is None or not error.is_of_service:
            self._was_cut = True
        if error is not None and not isinstance(error, NOT_NOW):
            raise error
        self._failures += 1
        wait_s = max(named_s, doubled_s(WAIT_S_MIN, self._failures, WAIT_S_MAX))
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        self._waited_s += wait_s
        if max(now_s + wait_s - self._lost_at_s, self._waited_s) > self._resume_s:
            if error is None:
                raise UnavailableError("the stream ended without a last event")
            raise UnavailableError(
                str(error),
                retry_after_s=error.retry_after_s,
                is_of_service=error.is_of_service,
            ) from error
        return wait_s

    def _wait_s_for_room(self, error: OverloadedError, now_s: float) -> float:
        """As long as the service says. Raises the error when that is beyond `overload_s`."""
        if self._refused_at_s is None:
            self._refused_at_s = now_s
        if error.retry_after_s is None:
            raise error
        wait_s = max(WAIT_S_MIN, error.retry_after_s)
        if now_s + wait_s - self._refused_at_s > self._overload_s:
            raise error
        return wait_s

    def raise_if_late(self, error: ApiError | None) -> None:
        """A request whose time ran out is told so, and where, behind its last event."""
        if isinstance(error, DeadlineExceededError) and any(
            choice.reason == "deadline_exceeded" for choice in self._choices.values()
        ):
            raise error

    def completion(self) -> Completion:
        """The whole answer. RequestCancelledError: it was closed before `is_done`."""
        if self._done is None:
            raise RequestCancelledError("it was closed before its end: there is no whole answer")
        return Completion(
            request_id=self.request_id,
            choices=tuple(_whole(self._choices[index]) for index in sorted(self._choices)),
            usage=usage_from_proto(self._done.usage),
            timings=timings_from_proto(self._done.timings),
            prompt=None if self._prompt is None else prompt_from_proto(self._prompt),
        )

    def _choice(self, index: int) -> _ChoiceSoFar:
        return self._choices.setdefault(index, _ChoiceSoFar())

    def _on_delta(self, delta: Delta) -> Delta | None:
        choice = self._choice(delta.choice)
        end = delta.position + delta.token_count
        is_rest = delta.token_count == 0
        if choice.has_rest if is_rest else end <= choice.position:
            return None
        if delta.position != choice.position:
            raise InternalServerError(
                f"choice {delta.choice}: expected position {choice.position}, got {delta.position}"
            )
        choice.position, choice.has_rest = end, is_rest
        choice.text.append(delta.text)
        if delta.reasoning:
            choice.reasoning.append(delta.reasoning)
        for part in delta.tool_calls:
            choice.calls.setdefault(part.index, []).append(part)
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        return delta

    def _on_finished(self, finished: pb.ChoiceFinished) -> None:
        is_cancelled = finished.reason == common_pb2.FINISH_REASON_CANCELLED
        if is_cancelled and self._was_cut and not self._keep_running:
            raise UnavailableError(
                "the connection broke, which its gateway took for leaving: the request was"
                " cancelled. Ask again under another id, or with keep_running=True",
                is_of_service=True,
            )
        choice = self._choice(finished.choice)
        if choice.reason is None:
            self._progressed()
        choice.reason = reason_from_proto(finished.reason)
        choice.output_tokens = finished.output_tokens
        choice.error = finished.error
        choice.is_retryable = finished.is_retryable
        choice.is_unsatisfiable = finished.is_unsatisfiable


def _whole(choice: _ChoiceSoFar) -> Choice:
    if choice.reason is None:
        raise InternalServerError("the request ended before one of its choices did")
    return Choice(
        text="".join(choice.text),
        finish_reason=choice.reason,
        output_tokens=choice.output_tokens,
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(choice.logprobs),
        error=choice.error,
        is_retryable=choice.is_retryable,
        is_unsatisfiable=choice.is_unsatisfiable,
        reasoning="".join(choice.reasoning),
        tool_calls=tuple(_call(parts) for parts in choice.calls.values()),
    )


def _call(parts: Sequence[ToolCallDelta]) -> ToolCall:
    """Who attached in the middle of it has neither id nor name."""
    arguments = "".join(part.arguments for part in parts)
    return ToolCall(id=parts[0].id, name=parts[0].name, arguments=arguments)
