"""The root span of every traced request, with the way into the ledger below it.

Its ids are minted when a request comes in and travel in its record, so the scheduler's phases are
its children; the span itself is made when the client has its last event. A client's own trace is
continued, and its wish not to be traced is kept, unless an accepted request is one of those that
somebody will ask about: failed, preempted, or late with its first token.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind
from opentelemetry.util.types import AttributeValue

from gateway.values.generation_request import ChatPrompt, GenerationRequest
from kaiten.v1.common_pb2 import FinishReason, SamplingParams
from kaiten.v1.inference_service_pb2 import Done
from service_kit import semconv
from service_kit.errors import KaitenError
from service_kit.grpc_errors import code_of
from service_kit.telemetry import (
    SLOW_FIRST_TOKEN_US,
    RateLimit,
    Spans,
    context_of,
    minted,
    trace_id_of,
    traceparent_of,
)

# Requests of one gateway that are traced when nothing goes wrong.
REQUESTS_PER_S: Final = 50
# Outcomes, and ends of a choice, that somebody will ask about.
FAILED: Final = frozenset({"error", "deadline_exceeded"})
# And what its client is told as an error: this gateway or its store went away.
ERRORS: Final = FAILED | {"moved"}
INTERNAL: Final = "INTERNAL"
INT64_MAX: Final = 2**63 - 1
UINT64_COUNT: Final = 2**64
# Numbers that a client may give, as the conventions name them.
_SAMPLING: Final = {
    "max_tokens": semconv.GEN_AI_REQUEST_MAX_TOKENS,
    "temperature": semconv.GEN_AI_REQUEST_TEMPERATURE,
    "top_p": semconv.GEN_AI_REQUEST_TOP_P,
    "top_k": semconv.GEN_AI_REQUEST_TOP_K,
    "seed": semconv.GEN_AI_REQUEST_SEED,
    "frequency_penalty": semconv.GEN_AI_REQUEST_FREQUENCY_PENALTY,
    "presence_penalty": semconv.GEN_AI_REQUEST_PRESENCE_PENALTY,
}


class Trace:
    """One request's root span to be. `context` is None where nobody listens."""

    __slots__ = (
        "accepted_ns",
        "choice_count",
        "context",
        "is_chat",
        "is_repeat",
        "is_stream",
        "ledger_id",
        "parent",
        "request_id",
        "sampling",
        "started_ns",
        "submitted_ns",
    )

    def __init__(
        self, request: GenerationRequest, parent: SpanContext | None, context: SpanContext | None
    ) -> None:
        self.is_chat = isinstance(request.prompt, ChatPrompt)
        self.is_stream = request.is_stream
        self.sampling, self.choice_count = request.sampling, request.n or 1
        # Until it has one of its own.
        self.request_id, self.ledger_id = request.request_id, ""
        # Whoever asked first has said which trace it belongs to.
        self.is_repeat = False
        self.parent = parent
        self.context = context
        # As soon as its first byte was here, if that is known.
        since_ns = time.perf_counter_ns() - request.arrived_ns if request.arrived_ns else 0
        self.started_ns = time.time_ns() - since_ns
        self.submitted_ns = self.accepted_ns = 0

    def submitting(self) -> None:
        """Its record is on its way into the ledger, where the scheduler's phases begin."""
        self.submitted_ns = time.time_ns()

    def traceparent(self, ledger_id: str, given: str) -> str:
        """What the record of that id carries: ours, or the client's own where we make no spans.

        Where the client brought none, its trace follows from its id.
        """
        self.ledger_id, self.request_id = ledger_id, ledger_id.partition(":")[2]
        if self.context is None:
            return given
        if self.parent is None:
            self.context = SpanContext(
                trace_id_of(ledger_id),
                self.context.span_id,
                is_remote=False,
                trace_flags=self.context.trace_flags,
            )
        return traceparent_of(self.context)


class Tracing:
    """`spans` None: nobody listens."""

    def __init__(self, spans: Spans | None, *, model: str) -> None:
        self._spans = spans
        self._model = model
        self._limit = RateLimit(REQUESTS_PER_S)

    def trace_id(self, ledger_id: str, traceparent: str | None) -> str:
        """In hex, of a request whose record has this. None, of an older leader: the one that
        follows from its id, where spans are made here. Empty: it has none.
        """
        if traceparent is None:
            return "" if self._spans is None else f"{trace_id_of(ledger_id):032x}"
        context = context_of(traceparent)
        return "" if context is None else f"{context.trace_id:032x}"

    @contextmanager
    def opening(self, request: GenerationRequest) -> Iterator[Trace]:
        """Until the request is accepted, or is not, be it that its client leaves: then this was all
        of it.
        """
        trace = self._begin(request)
        try:
            yield trace
        except BaseException as error:
            code = refusal_code(error)
            # A fault of ours is asked about whoever it met.
            is_sampled = trace.context is not None and trace.context.trace_flags.sampled
            is_kept = code == INTERNAL or (is_sampled and not request.is_put_off(error))
            if self._spans is not None and is_kept:
                self._put_root(trace, "refused", {}, end_ns=time.time_ns(), error=code)
            raise
        trace.accepted_ns = time.time_ns()

    def keeps(
        self, trace: Trace, outcome: str, reasons: Sequence[FinishReason], done: Done | None
    ) -> bool:
        """Its spans are: as it was decided at first, or as somebody will ask about it."""
        if trace.context is None:
            return False
        is_failed = not FAILED.isdisjoint([outcome, *map(_name, reasons)])
        return trace.context.trace_flags.sampled or is_failed or _is_asked_about(done)

    def closed(
        self,
        trace: Trace,
        outcome: str,
        reasons: Sequence[FinishReason],
        *,
        input_tokens: int,
        output_tokens: int,
        first_s: float = 0.0,
        done: Done | None = None,
    ) -> None:
        """A request is no longer followed. `reasons`: of the choices that ended; `first_s`: until
        the first output was on its way, if there was some; `done`: if all of it is over.
        """
        if self._spans is None or not self.keeps(trace, outcome, reasons, done):
            return
        names, end_ns = [*map(_name, reasons)], time.time_ns()
        error = next((each for each in (outcome, *names) if each in ERRORS), "")
        attributes: dict[str, AttributeValue] = {
            semconv.GEN_AI_USAGE_INPUT_TOKENS: input_tokens,
            semconv.GEN_AI_USAGE_OUTPUT_TOKENS: output_tokens,
            semconv.GEN_AI_RESPONSE_MODEL: self._model,
            semconv.GEN_AI_RESPONSE_FINISH_REASONS: names,
        }
        if trace.is_stream and first_s:
            attributes[semconv.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK] = first_s
        if done is not None:
            attributes[semconv.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] = done.usage.cached_tokens
            attributes["kaiten.preemptions"] = done.timings.preemptions
            attributes["kaiten.first_token_us"] = _first_token_us(done)
        self._put_root(trace, outcome, attributes, end_ns=end_ns, error=error)
        self._spans.put(
            "kaiten.accept",
            parent=trace.context,
            start_ns=trace.started_ns,
            end_ns=trace.accepted_ns,
            kind=SpanKind.PRODUCER,
            attributes=semconv.inbox_sent(trace.request_id),
        )
        if done is not None:
            self._put_delivery(trace, done, end_ns)

    def _put_delivery(self, trace: Trace, done: Done, end_ns: int) -> None:
        """What was left when its last token was computed: commit, journal, and the client's way.

        The phases before it began when the request arrived in the ledger, at some time of its
        submit's round trip: counted from the first of it there is no time of which nothing is told.
        """
        assert self._spans is not None
        timings = done.timings
        told_us = timings.queue_us + timings.prefill_us + timings.decode_us
        self._spans.put(
            "kaiten.deliver",
            parent=trace.context,
            start_ns=min(trace.submitted_ns + told_us * 1000, end_ns),
            end_ns=end_ns,
        )

    def _begin(self, request: GenerationRequest) -> Trace:
        if self._spans is None:
            return Trace(request, None, None)
        parent = context_of(request.traceparent)
        is_wanted = parent is None or parent.trace_flags.sampled
        is_sampled = is_wanted and self._limit.allows(time.monotonic_ns())
        return Trace(request, parent, minted(parent, is_sampled=is_sampled))

    def _put_root(
        self,
        trace: Trace,
        outcome: str,
        attributes: Mapping[str, AttributeValue],
        *,
        end_ns: int,
        error: str,
    ) -> None:
        assert self._spans is not None
        operation = semconv.CHAT if trace.is_chat else semconv.TEXT_COMPLETION
        self._spans.put(
            f"{operation} {self._model}",
            context=trace.context,
            parent=trace.parent,
            start_ns=trace.started_ns,
            end_ns=end_ns,
            kind=SpanKind.SERVER,
            attributes={
                semconv.GEN_AI_OPERATION_NAME: operation,
                semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER,
                semconv.GEN_AI_REQUEST_MODEL: self._model,
                "kaiten.outcome": outcome,
                **_asked(trace),
                **attributes,
                **({semconv.ERROR_TYPE: error} if error else {}),
            },
            error=error,
        )


def refusal_code(error: BaseException) -> str:
    """Of a request that was not accepted, as gRPC names it: for spans, metrics and the log."""
    if isinstance(error, KaitenError):
        return str(code_of(error).name)
    return "CANCELLED" if isinstance(error, asyncio.CancelledError) else INTERNAL


def _asked(trace: Trace) -> dict[str, AttributeValue]:
    """What the client wanted, as far as it is numbers."""
    sampling: SamplingParams = trace.sampling
    asked: dict[str, AttributeValue] = {
        name: _as_given(getattr(sampling, field))
        for field, name in _SAMPLING.items()
        if sampling.HasField(field)
    }
    if trace.is_stream:
        asked[semconv.GEN_AI_REQUEST_STREAM] = True
    if trace.choice_count != 1:
        asked[semconv.GEN_AI_REQUEST_CHOICE_COUNT] = trace.choice_count
    if trace.request_id:
        asked[semconv.GEN_AI_RESPONSE_ID] = trace.request_id
    return asked


def _as_given(number: int | float) -> int | float:
    """A record has fractions in 32 bits, and a seed unsigned: no attribute can hold its half."""
    if isinstance(number, float):
        return float(f"{number:.7g}")
    return number if number <= INT64_MAX else number - UINT64_COUNT


def _is_asked_about(done: Done | None) -> bool:
    """Preempted, or late with its first token: the leader keeps its phases by the same rule."""
    if done is None:
        return False
    return bool(done.timings.preemptions) or _first_token_us(done) >= SLOW_FIRST_TOKEN_US


def _first_token_us(done: Done) -> int:
    return int(done.timings.queue_us + done.timings.prefill_us)


def _name(reason: FinishReason) -> str:
    # A later version may know more of them.
    known = reason in FinishReason.values()
    return FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower() if known else "unknown"
