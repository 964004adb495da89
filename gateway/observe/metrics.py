"""What a gateway counts: every request it was asked, and how each one ended for its client.

The books balance at any time: accepted = ended + live. An end is what the client saw; what became
of a request that outlived its client here, the scheduler counts. docs/metrics.md lists it all.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns
from typing import Any, Final

from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, Meter

from gateway.observe.tracing import Trace, refusal_code
from gateway.tenants import Tenant
from gateway.values.generation_request import ChatPrompt, GenerationRequest
from kaiten.v1.common_pb2 import FinishReason
from service_kit import semconv
from service_kit.errors import (
    Cancelled,
    DeadlineExceeded,
    Failed,
    InvalidRequest,
    KaitenError,
    Overloaded,
    Unsatisfiable,
)
from service_kit.metrics import exemplar, seen

REQUEST_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
FIRST_TOKEN_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 60)
NEXT_TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
# Of a request whose choices ended differently, the end that somebody will ask about.
GRAVEST_FIRST: Final = {
    FinishReason.FINISH_REASON_ERROR: "error",
    FinishReason.FINISH_REASON_DEADLINE_EXCEEDED: "deadline_exceeded",
    FinishReason.FINISH_REASON_CANCELLED: "cancelled",
    FinishReason.FINISH_REASON_LENGTH: "length",
    FinishReason.FINISH_REASON_STOP: "stop",
}
# Of a request that was answered in full.
ANSWERED: Final = frozenset({FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH})
FULL: Final = frozenset(GRAVEST_FIRST[reason] for reason in ANSWERED)
# Ends that are no finish reasons: the client went away and the request was cancelled for it; it
# goes on without this client; this gateway or its store went away.
LEFT, DETACHED, MOVED = "left", "detached", "moved"
# Of another prompt in its body, which was refused or came to no answer: for nobody any more.
OF_ANOTHER: Final = (InvalidRequest, Overloaded, Failed, Unsatisfiable, Cancelled)
Key = tuple[str, str]
TENANTS_TOLD_MAX: Final = 256
# All who came later. No tenant has this name.
OTHERS: Final = "(others)"
# By which requests are refused for reasons that alerts ask for.
WATCHED_CODES: Final = ("INTERNAL", "RESOURCE_EXHAUSTED", "UNAVAILABLE")


class Visit:
    """One request, from its first byte to its end here."""

    __slots__ = (
        "first_ns",
        "is_chat",
        "is_repeat",
        "prompt_tokens",
        "started_ns",
        "tenant",
        "trace",
    )

    def __init__(self, *, tenant: str, is_chat: bool) -> None:
        self.tenant = tenant
        self.is_chat = is_chat
        self.is_repeat = False
        self.prompt_tokens = 0
        self.started_ns = perf_counter_ns()
        # When the first output was on its way to the client; 0: not yet.
        self.first_ns = 0
        self.trace: Trace | None = None


class Meters:
    """Of one gateway. `with_tenants` adds a label that has as many values as there are tenants, of
    whom the first so many are told apart.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        model: str,
        with_tenants: bool = False,
        has_exemplars: bool = False,
    ) -> None:
        """`has_exemplars`: somebody keeps them."""
        self._with_tenants, self._has_exemplars = with_tenants, has_exemplars
        self._tenants = set[str]()
        self._accepted = Counter[Key]()
        # What somebody waits for begins at 0, or the first of its kind would not be an increase.
        self._refused = Counter({(code, ""): 0 for code in WATCHED_CODES})
        self._ended = Counter({(outcome, ""): 0 for outcome in GRAVEST_FIRST.values()})
        self._prompt_tokens = Counter[Key]()
        self._output_tokens = Counter[Key]()
        self._count(meter)
        self._duration_s = _seconds(meter, "request.duration", REQUEST_S, "asked to the end")
        self._first_s = _seconds(
            meter, "time_to_first_token", FIRST_TOKEN_S, "asked to the first output"
        )
        self._next_s = _seconds(
            meter, "time_per_output_token", NEXT_TOKEN_S, "of each output token after the first"
        )
        self._chat, self._completion = (
            {
                semconv.GEN_AI_OPERATION_NAME: operation,
                semconv.GEN_AI_PROVIDER_NAME: semconv.PROVIDER,
                semconv.GEN_AI_REQUEST_MODEL: model,
            }
            for operation in (semconv.CHAT, semconv.TEXT_COMPLETION)
        )

    @contextmanager
    def opening(self, request: GenerationRequest, tenant: Tenant) -> Iterator[Visit]:
        """Count what happens inside: a request that is accepted, or refused with its code."""
        name = self._label(tenant) if self._with_tenants else ""
        visit = Visit(tenant=name, is_chat=isinstance(request.prompt, ChatPrompt))
        try:
            yield visit
        except BaseException as error:
            if not request.is_put_off(error):
                self._refused[refusal_code(error), name] += 1
            raise
        self._accepted["repeat" if visit.is_repeat else "new", name] += 1
        self._prompt_tokens["", name] += visit.prompt_tokens

    def _label(self, tenant: Tenant) -> str:
        """A series goes on for as long as the process: who came first is told for good."""
        if len(self._tenants) < TENANTS_TOLD_MAX:
            self._tenants.add(tenant.name)
        name = tenant.name if tenant.name in self._tenants else OTHERS
        for code in WATCHED_CODES:
            self._refused.setdefault((code, name), 0)
        return name

    def closed(
        self,
        visit: Visit,
        output_tokens: Sequence[int],
        outcome: str,
        *,
        is_kept: bool,
    ) -> None:
        """An accepted request is no longer followed. `is_kept`: its spans are."""
        self._ended[outcome, visit.tenant] += 1
        self._output_tokens["", visit.tenant] += sum(output_tokens)
        attributes = self._chat if visit.is_chat else self._completion
        now_ns = perf_counter_ns()
        ended = attributes if outcome in FULL else {**attributes, semconv.ERROR_TYPE: outcome}
        context = self._exemplar(visit) if is_kept else None
        self._duration_s.record((now_ns - visit.started_ns) / 1e9, ended, context)
        if visit.first_ns:
            self._first_s.record((visit.first_ns - visit.started_ns) / 1e9, attributes, context)
            if (more := max(output_tokens) - 1) > 0:
                self._next_s.record((now_ns - visit.first_ns) / 1e9 / more, attributes, context)

    def _exemplar(self, visit: Visit) -> Context | None:
        trace = visit.trace if self._has_exemplars else None
        return None if trace is None else exemplar(trace.context, is_kept=True)

    @property
    def _live(self) -> int:
        return self._accepted.total() - self._ended.total()

    def _count(self, meter: Meter) -> None:
        for name, counts, label, what in (
            ("requests_accepted", self._accepted, "origin", "requests that are in the ledger"),
            ("requests_refused", self._refused, "code", "requests that never were"),
            ("requests_ended", self._ended, "outcome", "accepted requests, as their clients left"),
            ("prompt_tokens", self._prompt_tokens, "", "of the requests accepted"),
            ("generation_tokens", self._output_tokens, "", "shown, of the requests ended"),
        ):
            read = seen(partial(_itself, counts), label, "tenant")
            meter.create_observable_counter(f"kaiten.gateway.{name}", read, "", what)
        live = seen(lambda: self._live)
        meter.create_observable_gauge("kaiten.gateway.requests_live", live, "", "being followed")


class BatchMeters:
    """Of the batches that one gateway drives. `driven`: how many those are now."""

    def __init__(self, meter: Meter, driven: Callable[[], int]) -> None:
        self.lines = Counter[str]()
        self.ended = Counter[str]()
        for name, counts, label, what in (
            ("batch_lines", self.lines, "outcome", "answered, or failed, of batches"),
            ("batches_ended", self.ended, "status", "as their clients are told"),
        ):
            read = seen(partial(_itself, counts), label)
            meter.create_observable_counter(f"kaiten.gateway.{name}", read, "", what)
        meter.create_observable_gauge("kaiten.gateway.batches_driven", seen(driven), "", "here")


def _itself(counts: Counter[Any]) -> Counter[Any]:
    return counts


def _seconds(meter: Meter, name: str, bounds: Sequence[float], what: str) -> Histogram:
    """One of the histograms that the GenAI semantic conventions name."""
    full = f"gen_ai.server.{name}"
    return meter.create_histogram(full, "s", what, explicit_bucket_boundaries_advisory=bounds)


def outcome_of(
    reasons: Sequence[FinishReason], error: BaseException | None, *, goes_on: bool
) -> str:
    """What an accepted request is counted as. `reasons`: of its choices, if all is over or one of
    them was told as an error.
    """
    if reasons:
        # One that only a later version knows is no answer either.
        known = (name for reason, name in GRAVEST_FIRST.items() if reason in reasons)
        return next(known, GRAVEST_FIRST[FinishReason.FINISH_REASON_ERROR])
    if isinstance(error, DeadlineExceeded):
        return GRAVEST_FIRST[FinishReason.FINISH_REASON_DEADLINE_EXCEEDED]
    if isinstance(error, OF_ANOTHER):
        return GRAVEST_FIRST[FinishReason.FINISH_REASON_CANCELLED]
    if isinstance(error, KaitenError):
        return MOVED
    # A fault of ours; of a client that goes away a coroutine hears otherwise.
    if isinstance(error, Exception):
        return GRAVEST_FIRST[FinishReason.FINISH_REASON_ERROR]
    return DETACHED if goes_on else LEFT
