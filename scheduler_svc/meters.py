"""What a scheduler counts. docs/operating.md says what each metric means.

Counters and gauges are plain numbers that a step changes and a scrape reads; only histograms are
recorded, two per step and four per request. The books balance at any time:
requests taken in = requests that ended + requests handed over + requests live.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from opentelemetry.metrics import Meter

from kaiten.v1.worker_service_pb2 import StepTimings
from scheduler_svc.core.outcome import Event, Plan, RequestOver
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Reason
from scheduler_svc.core.workers import Worker
from service_kit.metrics import Number, seen

STEP_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
HISTOGRAMS: Final = {
    "iteration_duration": ("s", STEP_S, "forward and sampling time of a step"),
    "iteration_tokens": ("", TOKENS, "tokens computed by a step"),
    "request_queue_time": ("s", REQUEST_S, "accepted to admitted"),
    "request_prefill_time": ("s", REQUEST_S, "admitted to first token"),
    "request_decode_time": ("s", REQUEST_S, "first token to the end"),
    "e2e_request_latency": ("s", REQUEST_S, "accepted to the end"),
}
COUNTS: Final = {
    "requests_handed_over": "live when this process stopped leading",
    "prompt_tokens": "of the requests taken in",
    "generation_tokens": "committed, whoever still wanted them",
    "prefix_cache_queries": "prompt tokens of requests that ended",
    "prefix_cache_hits": "of those, found in the prefix cache",
    "num_preemptions": "sequences put back into the queue for want of blocks",
}
HOW_LOST: Final = {True: "crash", False: "leave", None: "disconnect"}
# Of a request whose choices ended differently, the ending that somebody will ask about.
GRAVEST_FIRST: Final = (
    Reason.ERROR,
    Reason.DEADLINE_EXCEEDED,
    Reason.CANCELLED,
    Reason.LENGTH,
    Reason.STOP,
)


class Standing(Protocol):
    """The leadership that leads now, as far as it is measured."""

    core: Scheduler

    @property
    def commit_backlog(self) -> int: ...

    @property
    def stalled_ms(self) -> int: ...


class Meters:
    """Of one process, over all its terms."""

    def __init__(self, meter: Meter) -> None:
        # None: this process stands by.
        self.session: Standing | None = None
        self._requests = Counter(new=0, recovered=0)
        self._ended = Counter({reason.value: 0 for reason in Reason})
        self._workers_lost = Counter(dict.fromkeys(HOW_LOST.values(), 0))
        self._counts = Counter[str]()
        self._count(meter)
        self._gauge(meter)
        self._histograms = {
            name: meter.create_histogram(
                f"kaiten.{name}", unit, what, explicit_bucket_boundaries_advisory=bounds
            )
            for name, (unit, bounds, what) in HISTOGRAMS.items()
        }

    # What happens

    def took_in(self, prompt_tokens: int, *, is_new: bool) -> None:
        """A request is live from here on, for the first time or again under this leader."""
        self._requests["new" if is_new else "recovered"] += 1
        if is_new:
            self._counts["prompt_tokens"] += prompt_tokens

    def planned(self, plan: Plan) -> None:
        """A plan was made."""
        self._counts["num_preemptions"] += len(plan.preempted)

    def stepped(self, tokens: int, timings: StepTimings) -> None:
        """A step was booked, with so many tokens of output."""
        self._counts["generation_tokens"] += tokens
        took_us = timings.forward_us + timings.sample_us
        self._histograms["iteration_duration"].record(took_us / 1e6)
        self._histograms["iteration_tokens"].record(timings.tokens_computed)

    def ended(self, events: Iterable[Event]) -> None:
        """Requests may be over."""
        for event in events:
            if isinstance(event, RequestOver):
                self._over(event)

    def lost_worker(self, *, is_crash: bool | None) -> None:
        """A worker is gone. None: so far only its connection is; a crash is counted once known."""
        self._workers_lost[HOW_LOST[is_crash]] += 1

    def leads(self, session: Standing | None) -> None:
        """Another leadership, or none. What the old one had live is the next leader's."""
        if self.session is not None:
            self._counts["requests_handed_over"] += self.session.core.live_count
        self.session = session

    def _over(self, over: RequestOver) -> None:
        reasons = {ending.reason for ending in over.endings}
        self._ended[next(reason for reason in GRAVEST_FIRST if reason in reasons).value] += 1
        self._counts["prefix_cache_queries"] += over.num_prompt_tokens
        self._counts["prefix_cache_hits"] += over.num_cached_tokens
        total_ns = over.queue_ns + over.prefill_ns + over.decode_ns
        for phase, took_ns in (
            ("request_queue_time", over.queue_ns),
            ("request_prefill_time", over.prefill_ns),
            ("request_decode_time", over.decode_ns),
            ("e2e_request_latency", total_ns),
        ):
            self._histograms[phase].record(took_ns / 1e9)

    # What is told

    def _count(self, meter: Meter) -> None:
        counter = meter.create_observable_counter
        counter("kaiten.requests", seen(lambda: self._requests, "origin"), "", "taken in")
        ended = seen(lambda: self._ended, "finished_reason")
        counter("kaiten.request_success", ended, "", "requests that ended, however they did")
        lost = seen(lambda: self._workers_lost, "how")
        counter("kaiten.workers_lost", lost, "", "workers that crashed, left or broke off")
        for name, what in COUNTS.items():
            counter(f"kaiten.{name}", seen(self._reader(name)), "", what)

    def _reader(self, name: str) -> Callable[[], Number]:
        return lambda: self._counts[name]

    def _gauge(self, meter: Meter) -> None:
        def gauge(name: str, what: str, read: Callable[[Standing], Number], unit: str = "") -> None:
            def now() -> Number:
                session = self.session
                return 0 if session is None else read(session)

            meter.create_observable_gauge(f"kaiten.{name}", seen(now), unit, what)

        gauge("is_leader", "this process leads the cell", lambda session: 1)
        gauge("requests_live", "accepted and not over", lambda session: session.core.live_count)
        gauge(
            "num_requests_waiting", "sequences that wait", lambda session: len(session.core.waiting)
        )
        gauge("num_requests_running", "sequences in a batch", _running)
        gauge("num_workers", "workers connected", lambda session: len(session.core.workers))
        gauge("kv_cache_usage_perc", "share of KV blocks held, 0 to 1", _kv_share)
        gauge("commit_backlog", "records not acknowledged", lambda session: session.commit_backlog)
        gauge("stalled", "work without a commit", lambda session: session.stalled_ms / 1000, "s")


def _running(session: Standing) -> int:
    return sum(len(worker.running) for worker in _workers(session))


def _kv_share(session: Standing) -> float:
    """Of all blocks of all workers, those that live sequences hold."""
    managers = [worker.kv for worker in _workers(session)]
    blocks = sum(kv.block_count for kv in managers)
    return 1 - sum(kv.free_count for kv in managers) / blocks if blocks else 0.0


def _workers(session: Standing) -> list[Worker]:
    """A copy: this is another thread than the one that changes them."""
    return list(session.core.workers.values())
