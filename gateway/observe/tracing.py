"""The root span of every traced request, with the way into the ledger below it.

Its ids are minted when a request comes in and travel in its record, so the scheduler's phases are
its children; the span itself is made when the client has its last event. A client's own trace is
continued, and its wish not to be traced is kept, unless an accepted request fails.
"""

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from gateway.values.generation_request import Ask, ChatPrompt
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import KaitenError
from service_kit.grpc_errors import code_of
from service_kit.telemetry import RateLimit, Spans, context_of, minted, trace_id_of, traceparent_of

# Requests of one gateway that are traced when nothing goes wrong.
REQUESTS_PER_S: Final = 50
FAILED: Final = frozenset(
    {FinishReason.FINISH_REASON_ERROR, FinishReason.FINISH_REASON_DEADLINE_EXCEEDED}
)


class Trace:
    """One request's root span to be. `context` is None where nobody listens."""

    __slots__ = ("accepted_ns", "context", "is_chat", "parent", "started_ns")

    def __init__(self, ask: Ask, parent: SpanContext | None, context: SpanContext | None) -> None:
        self.is_chat = isinstance(ask.prompt, ChatPrompt)
        self.parent = parent
        self.context = context
        self.started_ns = time.time_ns()
        self.accepted_ns = 0

    def traceparent(self, ledger_id: str, given: str) -> str:
        """What the record of that id carries: ours, or the client's own where we make no spans.

        Where the client brought none, its trace follows from its id.
        """
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

    def trace_id(self, ledger_id: str) -> str:
        """In hex, of a request whose client brought no trace; empty: no spans are made here."""
        return "" if self._spans is None else f"{trace_id_of(ledger_id):032x}"

    @contextmanager
    def opening(self, ask: Ask) -> Iterator[Trace]:
        """Until the request is accepted, or refused: then this was all of it."""
        trace = self._begin(ask)
        try:
            yield trace
        except KaitenError as error:
            if trace.context is not None and trace.context.trace_flags.sampled:
                self._put_root(trace, "refused", {}, error=str(code_of(error).name))
            raise
        trace.accepted_ns = time.time_ns()

    def closed(
        self,
        trace: Trace,
        outcome: str,
        reasons: Collection[FinishReason],
        *,
        input_tokens: int,
        output_tokens: int,
    ) -> None:
        """A request is no longer followed. `reasons`: of the choices that ended."""
        if trace.context is None or self._spans is None:
            return
        is_failed = not FAILED.isdisjoint(reasons)
        if not (trace.context.trace_flags.sampled or is_failed):
            return
        usage = {
            "gen_ai.usage.input_tokens": input_tokens,
            "gen_ai.usage.output_tokens": output_tokens,
        }
        self._put_root(trace, outcome, usage, error=outcome if is_failed else "")
        self._spans.put(
            "kaiten.accept",
            parent=trace.context,
            start_ns=trace.started_ns,
            end_ns=trace.accepted_ns,
        )

    def _begin(self, ask: Ask) -> Trace:
        if self._spans is None:
            return Trace(ask, None, None)
        parent = context_of(ask.traceparent)
        is_wanted = parent is None or parent.trace_flags.sampled
        is_sampled = is_wanted and self._limit.allows(time.monotonic_ns())
        return Trace(ask, parent, minted(parent, is_sampled=is_sampled))

    def _put_root(
        self, trace: Trace, outcome: str, usage: Mapping[str, int], *, error: str
    ) -> None:
        assert self._spans is not None
        operation = "chat" if trace.is_chat else "text_completion"
        self._spans.put(
            f"{operation} {self._model}",
            context=trace.context,
            parent=trace.parent,
            start_ns=trace.started_ns,
            end_ns=time.time_ns(),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": self._model,
                "kaiten.outcome": outcome,
                **usage,
            },
            error=error,
        )
