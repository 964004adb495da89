"""What a scheduler counts. docs/metrics.md says what each metric means.

Counters and gauges are plain numbers that a step changes and a scrape reads; only histograms are
recorded, two per step and seven per request. The books balance at any time:
requests taken in = requests that ended + requests handed over + requests live.
What a deposed leader decides and cannot commit is its successor's to count, so tokens and ends
count once they are committed.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, Protocol

from opentelemetry.metrics import Meter

from kaiten.v1.ledger_pb2 import JournalRecord
from kaiten.v1.worker_service_pb2 import StepTimings
from ledger import Leader
from scheduler_svc.core.outcome import Event, PassedOver, Plan, RequestOver, Why
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Reason, SequenceId, WorkerSpec
from scheduler_svc.core.workers import Worker
from scheduler_svc.decisions import budget_of, tokens_of, whys_of
from scheduler_svc.load import NO_LOAD, Load, WorkerLoad, kv_share
from scheduler_svc.tracing import is_asked_about
from scheduler_svc.worker_meters import WorkerMeters
from service_kit.metrics import NO_METER, Number, exemplar, seen
from service_kit.telemetry import context_of

STEP_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
REQUEST_S: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
FREE_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)
TOKENS: Final = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
HISTOGRAMS: Final = {
    "iteration_duration": ("s", STEP_S, "forward and sampling time of a step"),
    "iteration_tokens": ("", TOKENS, "tokens computed by a step"),
    "request_queue_time": ("s", REQUEST_S, "accepted to admitted"),
    "request_prefill_time": ("s", REQUEST_S, "admitted to first token"),
    "request_decode_time": ("s", REQUEST_S, "first token to the end"),
    "request_inference_time": ("s", REQUEST_S, "admitted to the end"),
    "e2e_request_latency": ("s", REQUEST_S, "accepted to the end"),
    "request_prompt_tokens": ("", TOKENS, "prompt tokens of a request that ended"),
    "request_generation_tokens": ("", TOKENS, "output tokens of one, of all its choices"),
    "abort_to_free": ("s", FREE_S, "a cancel in the store until slots and blocks are free"),
}
COUNTS: Final = {
    "requests_handed_over": "live when this process stopped leading",
    "prompt_tokens": "of requests whose first token is committed",
    "generation_tokens": "committed, whoever still wanted them",
    "prefix_cache_queries": "prompt tokens of requests that ended",
    "prefix_cache_hits": "of those, found in the prefix cache",
    "num_preemptions": "sequences put back into the queue for want of blocks",
    "leader_changes": "times this process began to lead",
    "budget_tokens": "that first steps of plans might have computed",
    "budget_tokens_used": "of those, the ones that plans gave to somebody",
}
# Where the time of iterations goes. By us: decisions, and results booked. By gRPC: a plan until it
# is written. By workers. By the ledger: round trips, which steps run beside.
PARTS: Final = ("plan", "book", "send", "wait", "forward", "sample", "commit")
WORKER_GAUGES: Final[Mapping[str, tuple[str, str, Callable[[WorkerLoad], Number]]]] = {
    "worker_slots": ("", "rows that a worker's batch may have", attrgetter("slots")),
    "worker_slots_used": ("", "rows that it has", attrgetter("slots_used")),
    "worker_kv_places": ("", "tokens that a worker's KV blocks hold", attrgetter("kv_places")),
    "worker_kv_places_held": ("", "of those, in blocks of sequences", attrgetter("kv_places_held")),
    "worker_kv_tokens": ("", "computed tokens of its sequences", attrgetter("kv_tokens")),
    "worker_host_kv_blocks": ("", "KV blocks in host memory", attrgetter("host_kv_blocks")),
    "worker_host_kv_blocks_used": (
        "",
        "of those, the ones that hold something",
        attrgetter("host_kv_blocks_used"),
    ),
    "worker_heartbeat_age": (
        "s",
        "since a worker was heard of, as far as we were listening",
        attrgetter("heartbeat_age_s"),
    ),
}
# How much a request that ends counts in what an output is expected to be.
OUTPUT_WEIGHT: Final = 1 / 32
HOW_LOST: Final = {True: "crash", False: "leave", None: "disconnect"}
# Of a request whose choices ended differently, the ending that somebody will ask about.
GRAVEST_FIRST: Final = (
    Reason.ERROR,
    Reason.UNSERVED,
    Reason.UNSATISFIABLE,
    Reason.DEADLINE_EXCEEDED,
    Reason.CANCELLED,
    Reason.LENGTH,
    Reason.STOP,
)


class Standing(Protocol):
    """The leadership that leads now, as far as it is measured."""

    core: Scheduler
    leader: Leader

    @property
    def commit_backlog(self) -> int: ...

    @property
    def fold_lag(self) -> int: ...

    @property
    def stalled_ms(self) -> int: ...


class Meters:
    """Of one process, over all its terms."""

    def __init__(
        self, meter: Meter, *, with_tenants: bool = False, has_exemplars: bool = False
    ) -> None:
        """`with_tenants` adds a label that has as many values as there are tenants, up to a bound;
        `has_exemplars`: somebody keeps them.
        """
        # Somebody reads them.
        self.is_heard = meter is not NO_METER
        # None: this process stands by.
        self.session: Standing | None = None
        # Of its last look, once a second while it leads.
        self.load: Load = NO_LOAD
        # What an output was of late, of who had a slot; 0: none has ended.
        self.output_tokens = 0.0
        self._has_exemplars = has_exemplars
        self._requests = Counter(new=0, recovered=0)
        self._ended = Counter({reason.value: 0 for reason in Reason})
        # What counts, by the number of the record that says so.
        self._uncommitted: deque[tuple[int, Callable[[], None]]] = deque()
        self._workers_lost = Counter(dict.fromkeys(HOW_LOST.values(), 0))
        self._counts = Counter[str]()
        self._passed_over = Counter[tuple[str, str]]()
        self._spent_ns = Counter(dict.fromkeys(PARTS, 0))
        self._of_workers = WorkerMeters(meter, lambda: self.load.workers.keys())
        self._count(meter)
        self._gauge(meter)
        self._gauge_load(meter, with_tenants=with_tenants)
        self._histograms = {
            name: meter.create_histogram(
                f"kaiten.{name}", unit, what, explicit_bucket_boundaries_advisory=bounds
            )
            for name, (unit, bounds, what) in HISTOGRAMS.items()
        }

    # What happens

    def took_in(self, *, is_new: bool) -> None:
        """A request is live from here on, for the first time or again under this leader."""
        self._requests["new" if is_new else "recovered"] += 1

    def asked(self, worker: str, passed_over: Iterable[PassedOver]) -> None:
        """A plan was asked for, for the worker at this address; whom its stages passed over,
        whether or not there was one.
        """
        for over in passed_over:
            reason = over.why.name.lower()
            self._passed_over[over.stage, reason] += 1
            self._of_workers.passed_over(worker, over.stage, reason)

    def held_back(self, workers: int) -> None:
        """So many workers were not asked for a plan: the store is behind."""
        self._passed_over["plan", Why.STORE_BEHIND.name.lower()] += workers

    def planned(
        self, worker: str, plan: Plan, passed_over: Iterable[PassedOver], spec: WorkerSpec
    ) -> None:
        """A plan was made for the worker at this address; who leaves its batch and is not among
        those passed over does so for want of blocks.
        """
        counts, budget, used = self._counts, budget_of(plan, spec), tokens_of(plan, spec)
        counts["num_preemptions"] += [*whys_of(plan, passed_over)].count(None)
        counts["budget_tokens"] += budget
        counts["budget_tokens_used"] += used
        hits = sum(join.num_computed_tokens for join in plan.joins)
        swapped_in = sum(source >= spec.block_count for source, _ in plan.swaps)
        swapped_out = len(plan.swaps) - swapped_in
        self._of_workers.planned(
            worker,
            budget_tokens=budget,
            budget_tokens_used=used,
            prefix_hit_tokens=hits,
            kv_blocks_swapped_out=swapped_out,
            kv_blocks_swapped_in=swapped_in,
        )

    def stepped(self, timings: StepTimings) -> None:
        """A step was booked."""
        spent_ns, forward_us, sample_us = self._spent_ns, timings.forward_us, timings.sample_us
        spent_ns["wait"] += timings.wait_us * 1000
        spent_ns["forward"] += forward_us * 1000
        spent_ns["sample"] += sample_us * 1000
        self._histograms["iteration_duration"].record((forward_us + sample_us) / 1e6)
        self._histograms["iteration_tokens"].record(timings.tokens_computed)

    def spent(self, part: str, took_ns: int) -> None:
        """So long one of `PARTS` has taken."""
        self._spent_ns[part] += took_ns

    def freed(self, after_ns: int) -> None:
        """What a cancelled request had is free, so long after the store took the cancel in."""
        self._histograms["abort_to_free"].record(after_ns / 1e9)

    def answered(self, seq: int, prompt_tokens: int) -> None:
        """By the record of this number requests of so many have their first token."""
        if prompt_tokens:
            count = partial(self._counts.update, prompt_tokens=prompt_tokens)
            self._uncommitted.append((seq, count))

    def ended(self, seq: int, events: Iterable[Event], of: Callable[[SequenceId], str]) -> None:
        """Requests may be over by the record of this number. `of`: the traceparent of one."""
        for event in events:
            if isinstance(event, RequestOver):
                traceparent = of(event.sequence_id) if self._has_exemplars else ""
                self._uncommitted.append((seq, partial(self._over, event, traceparent)))

    def committed(self, records: Sequence[JournalRecord]) -> None:
        """The ledger has these."""
        self._counts["generation_tokens"] += sum(len(record.token_ids) for record in records)
        while self._uncommitted and self._uncommitted[0][0] <= records[-1].seq:
            _, count = self._uncommitted.popleft()
            count()

    def lost_worker(self, *, is_crash: bool | None) -> None:
        """A worker is gone. None: so far only its connection is; a crash is counted once known."""
        self._workers_lost[HOW_LOST[is_crash]] += 1

    def leads(self, session: Standing | None) -> None:
        """Another leadership, or none. What the old one had live is the next leader's."""
        self._counts["requests_handed_over"] += self.live
        self._uncommitted.clear()
        self._counts["leader_changes"] += session is not None
        self.session, self.load = session, NO_LOAD

    def _over(self, over: RequestOver, traceparent: str) -> None:
        reasons = {ending.reason for ending in over.endings}
        self._ended[next(reason for reason in GRAVEST_FIRST if reason in reasons).value] += 1
        self._counts["prefix_cache_queries"] += over.num_prompt_tokens
        self._counts["prefix_cache_hits"] += over.num_cached_tokens
        inference_ns = over.prefill_ns + over.decode_ns
        # Who never had a slot, of no leader, says nothing of how soon others free theirs.
        if inference_ns or over.num_output_tokens:
            each = over.num_output_tokens / len(over.outputs)
            weight = OUTPUT_WEIGHT if self.output_tokens else 1.0
            self.output_tokens += (each - self.output_tokens) * weight
        total_ns = over.queue_ns + inference_ns
        span = context_of(traceparent) if traceparent else None
        context = exemplar(span, is_kept=is_asked_about(over))
        for name, value in (
            ("request_queue_time", over.queue_ns / 1e9),
            ("request_prefill_time", over.prefill_ns / 1e9),
            ("request_decode_time", over.decode_ns / 1e9),
            ("request_inference_time", inference_ns / 1e9),
            ("e2e_request_latency", total_ns / 1e9),
            ("request_prompt_tokens", over.num_prompt_tokens),
            ("request_generation_tokens", over.num_output_tokens),
        ):
            self._histograms[name].record(value, context=context)

    # What is told

    @property
    def live(self) -> int:
        """Requests taken in whose end is not committed."""
        gone = self._ended.total() + self._counts["requests_handed_over"]
        return self._requests.total() - gone

    def _count(self, meter: Meter) -> None:
        counter = meter.create_observable_counter
        counter("kaiten.requests", seen(lambda: self._requests, "origin"), "", "taken in")
        ended = seen(lambda: self._ended, "finished_reason")
        counter("kaiten.request_success", ended, "", "requests that ended, however they did")
        lost = seen(lambda: self._workers_lost, "how")
        counter("kaiten.workers_lost", lost, "", "workers that crashed, left or broke off")
        passed_over = seen(lambda: self._passed_over, "stage", "reason")
        counter("kaiten.passed_over", passed_over, "", "times that somebody was not scheduled")
        spent = seen(self._seconds, "part")
        counter("kaiten.iteration_time", spent, "s", "where the time of iterations goes")
        for name, what in COUNTS.items():
            counter(f"kaiten.{name}", seen(self._reader(name)), "", what)

    def _seconds(self) -> Mapping[str, float]:
        return {part: ns / 1e9 for part, ns in self._spent_ns.items()}

    def _reader(self, name: str) -> Callable[[], Number]:
        return lambda: self._counts[name]

    def _gauge(self, meter: Meter) -> None:
        def gauge(name: str, what: str, read: Callable[[Standing], Number], unit: str = "") -> None:
            def now() -> Number:
                session = self.session
                return 0 if session is None else read(session)

            meter.create_observable_gauge(f"kaiten.{name}", seen(now), unit, what)

        what = "of this leadership; every later one's is higher"
        meter.create_observable_gauge("kaiten.leader_epoch", seen(self._epoch), "", what)
        gauge("is_leader", "this process leads the cell", lambda session: 1)
        live = seen(lambda: self.live)
        meter.create_observable_gauge("kaiten.requests_live", live, "", "accepted and not over")
        gauge(
            "num_requests_waiting", "sequences that wait", lambda session: len(session.core.waiting)
        )
        gauge("num_requests_running", "sequences in a batch", _running)
        gauge("num_workers", "workers connected", lambda session: len(session.core.workers))
        gauge(
            "kv_cache_usage_perc",
            "share of KV blocks held, 0 to 1",
            lambda s: kv_share(_workers(s)),
        )
        gauge("commit_backlog", "records not acknowledged", lambda session: session.commit_backlog)
        gauge("fold_lag", "committed records that are not folded", lambda session: session.fold_lag)
        gauge("stalled", "work without a commit", lambda session: session.stalled_ms / 1000, "s")

    def _epoch(self) -> Mapping[tuple[()], Number]:
        """None while it stands by: no number of another leadership is between two."""
        session = self.session
        return {} if session is None else {(): session.leader.epoch}

    def _gauge_load(self, meter: Meter, *, with_tenants: bool) -> None:
        def gauge(name: str, what: str, of: str, unit: str = "", *labels: str) -> None:
            read = seen(lambda: getattr(self.load, of), *labels)
            meter.create_observable_gauge(f"kaiten.{name}", read, unit, what)

        gauge(
            "queue_time_forecast",
            "how long a request that came now would wait for its slot",
            "queue_time_forecast_s",
            "s",
        )
        gauge("journal_lag", "age of the oldest unacknowledged record", "journal_lag_s", "s")
        gauge("queued_tokens", "known tokens of sequences that wait", "queued_tokens")
        if with_tenants:
            what = "known tokens of sequences that wait, by tenant"
            gauge("tenant_queued_tokens", what, "tenant_queued_tokens", "", "tenant")
            what = "prompt and max_tokens of what runs, by tenant"
            gauge("tenant_running_tokens", what, "tenant_running_tokens", "", "tenant")
        for name, (unit, what, of) in WORKER_GAUGES.items():
            read = seen(self._worker_reader(of), "worker")
            meter.create_observable_gauge(f"kaiten.{name}", read, unit, what)

    def _worker_reader(
        self, of: Callable[[WorkerLoad], Number]
    ) -> Callable[[], Mapping[str, Number]]:
        return lambda: {address: of(worker) for address, worker in self.load.workers.items()}


def _running(session: Standing) -> int:
    return sum(len(worker.running) for worker in _workers(session))


def _workers(session: Standing) -> list[Worker]:
    """A copy: this is another thread than the one that changes them."""
    return list(session.core.workers.values())
