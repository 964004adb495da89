"""Each iteration's decision in the words of its reader: what was scheduled, and why not the rest.

Derived, not stored: a replay makes every decision again, and what is told here is read from the
command, what came of it, and the core as it was then. Pure.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from scheduler_svc.core.blocks import BlockCounts
from scheduler_svc.core.commands import Command, Configured, MakePlan, StepDone
from scheduler_svc.core.outcome import Outcome, PassedOver, Plan, Why
from scheduler_svc.core.requests import Sequence
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import SequenceId, WorkerSpec
from scheduler_svc.core.workers import Worker
from scheduler_svc.live_view import why_it_waits
from scheduler_svc.timeline_track import NO_BLOCKS, QUEUE_STAGES, blocks_of

# Of one decision: who waits, each with why. All that stand behind are counted.
WAITING_TOLD_MAX: Final = 64
# Of a worker, whose steps may still come: more are not in flight.
PLANS_MAX: Final = 16


class Admitted(NamedTuple):
    """Who took a slot, what of it was cached, and its blocks, some of which others have too: of
    these, such as came back from host memory.
    """

    sequence_id: SequenceId
    request_id: str
    slot: int
    tokens: int
    cached_tokens: int
    blocks: int
    shared_blocks: int
    swapped_in_blocks: int


class Waits(NamedTuple):
    """Who was not scheduled and why; `behind`: who could not start, and may not be overtaken."""

    sequence_id: SequenceId
    request_id: str
    why: str
    behind: SequenceId | None


class Blocks(NamedTuple):
    """Of the worker's pool, since the decision before: taken anew, and of those such as were cached
    until then; shared, or found in the cache; given back; copied to the host's memory and back. And
    free now, of all.
    """

    allocated: int
    evicted: int
    shared: int
    freed: int
    swapped_out: int
    swapped_in: int
    free: int
    total: int


class Free(NamedTuple):
    """Of the worker's pool, where a record is all that is known: free now, of all."""

    free: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One plan."""

    unix_ns: int
    worker_id: str
    plan_id: int
    policy: str
    lease_steps: int
    # Of the first step: rows that decode, prompt tokens by sequence, and what a step may have.
    decode_rows: int
    chunks: tuple[tuple[SequenceId, int], ...]
    sat_out: tuple[SequenceId, ...]
    tokens: int
    budget: int
    admitted: tuple[Admitted, ...]
    preempted: tuple[tuple[SequenceId, str], ...]
    blocks: Blocks | Free
    waiting: int
    waits: tuple[Waits, ...]
    # What a stage says of nobody in particular: why the lease is short, why nobody was looked at.
    stages: tuple[tuple[str, str], ...]
    # By the cost model, as it was then; 0: it knew nothing yet, or a record is all that is known.
    expected_us: int

    def concerns(self, ids: set[SequenceId]) -> bool:
        """It says something of one of these."""
        told = {each.sequence_id for each in self.admitted}
        told |= {each.sequence_id for each in self.waits}
        told |= {one for one, _ in self.chunks} | {one for one, _ in self.preempted}
        return not ids.isdisjoint(told.union(self.sat_out))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step of a plan, as its worker measured it, beside what the cost model expected."""

    unix_ns: int
    worker_id: str
    plan_id: int
    step: int
    rows: int
    step_us: int
    expected_us: int
    is_graph: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a plan's decision is told from when the core has gone on."""

    unix_ns: int
    plan: Plan
    policy: str
    spec: WorkerSpec
    passed_over: tuple[PassedOver, ...]
    # Prompt tokens of its first step by sequence; 0: sits it out.
    chunks: tuple[tuple[SequenceId, int], ...]
    # Of who joins, the requests.
    joined: tuple[str, ...]
    blocks: Blocks | Free
    # Of the first step, and of those after it.
    expected_us: tuple[int, int]

    def decision(self, waits: tuple[Waits, ...] | None = None) -> Decision:
        """`waits`: of the queue as it was then; None: of those alone who were looked at."""
        plan, spec = self.plan, self.spec
        return Decision(
            unix_ns=self.unix_ns,
            worker_id=plan.worker_id,
            plan_id=plan.plan_id,
            policy=self.policy,
            lease_steps=plan.lease_steps,
            decode_rows=plan.decode_rows,
            chunks=tuple((one, count) for one, count in self.chunks if count),
            sat_out=tuple(one for one, count in self.chunks if not count),
            tokens=tokens_of(plan, spec),
            budget=budget_of(plan, spec),
            admitted=tuple(_admitted(plan, self.joined, spec.block_size)),
            preempted=tuple(
                (one, NO_BLOCKS if why is None else why.value)
                for one, why in zip(plan.preempted, whys_of(plan, self.passed_over), strict=True)
            ),
            blocks=self.blocks,
            waiting=plan.waiting,
            waits=tuple(_named(self.passed_over)) if waits is None else waits,
            stages=tuple((p.stage, p.why.value) for p in self.passed_over if p.sequence_id is None),
            expected_us=self.expected_us[0],
        )


class Decisions:
    """Told of every command of a core, it has something to say of some."""

    def __init__(self, policy: str = "") -> None:
        self._policy = policy
        # Workers that are gone take theirs with them.
        self._counts: WeakKeyDictionary[Worker, BlockCounts] = WeakKeyDictionary()
        # Of the plans in flight of a worker: a first step, and those after it.
        self._expected: WeakKeyDictionary[Worker, dict[int, tuple[int, int]]] = WeakKeyDictionary()

    def take(
        self, command: Command, outcome: Outcome, now_ns: int, core: Scheduler
    ) -> Decision | Measured | None:
        """What it decided, or measured."""
        match command:
            case Configured():
                self._policy = command.policy
            case MakePlan() if outcome.plan is not None:
                return self.decided(outcome.plan, outcome.passed_over, now_ns, core)
            case StepDone():
                return self._measured(command, outcome, now_ns, core)
        return None

    def keep(
        self, plan: Plan, passed_over: Iterable[PassedOver], now_ns: int, core: Scheduler
    ) -> Kept:
        """A plan that was made just now, of which somebody may ask later. Cheap: of each."""
        worker = core.workers[plan.worker_id]
        rows = worker.running
        return Kept(
            unix_ns=now_ns,
            plan=plan,
            policy=self._policy,
            spec=worker.spec,
            passed_over=tuple(passed_over),
            chunks=tuple([(rows[s].sequence_id, count) for s, count in plan.chunks if s in rows]),
            joined=tuple([_request_id(rows.get(join.slot)) for join in plan.joins]),
            blocks=self._blocks(worker),
            expected_us=expected_of(plan, worker),
        )

    def decided(
        self, plan: Plan, passed_over: Iterable[PassedOver], now_ns: int, core: Scheduler
    ) -> Decision:
        """What a plan was made of, just now."""
        kept = self.keep(plan, passed_over, now_ns, core)
        expected = self._expected.setdefault(core.workers[plan.worker_id], {})
        if len(expected) == PLANS_MAX:
            del expected[next(iter(expected))]
        expected[plan.plan_id] = kept.expected_us
        return kept.decision(waits_of(core, kept.passed_over))

    def _blocks(self, worker: Worker) -> Blocks:
        counts = worker.kv.counts
        before = self._counts.get(worker, BlockCounts())
        self._counts[worker] = counts
        return Blocks(*counts.since(before), worker.kv.free_count, worker.kv.block_count)

    def _measured(
        self, command: StepDone, outcome: Outcome, now_ns: int, core: Scheduler
    ) -> Measured:
        result = command.result
        worker = core.workers[result.worker_id]
        expected = self._expected.get(worker, {})
        for plan_id in [plan_id for plan_id in expected if plan_id < result.plan_id]:
            del expected[plan_id]
        first_us, other_us = expected.get(result.plan_id, (0, 0))
        assert outcome.tokens is not None
        return Measured(
            unix_ns=now_ns,
            worker_id=worker.id,
            plan_id=result.plan_id,
            step=result.step,
            rows=len({*outcome.tokens.slots}),
            step_us=result.step_us,
            expected_us=other_us if result.step else first_us,
            is_graph=result.is_graph,
        )


def expected_of(plan: Plan, worker: Worker) -> tuple[int, int]:
    """In us, the first step of its newest plan and those after it, in which whoever has a token
    in the first decodes; by the cost model as it is. 0: it knows nothing.
    """
    first_us = worker.cost.decode_us(plan.decode_rows) + worker.cost.prefill_us(plan.chunk_tokens)
    return first_us, worker.cost.decode_us(len(worker.flights[-1].sampling))


def budget_of(plan: Plan, spec: WorkerSpec) -> int:
    """Tokens that its first step might have."""
    return spec.mixed_budget if plan.decode_rows else spec.step_tokens_max


def tokens_of(plan: Plan, spec: WorkerSpec) -> int:
    """Of those, what it gives to somebody: a row that decodes may have several."""
    return plan.chunk_tokens + plan.decode_rows * spec.slot_tokens_max


def whys_of(plan: Plan, passed_over: Iterable[PassedOver]) -> Iterator[Why | None]:
    """Of those it preempts, one by one; None: for want of blocks."""
    whys = {p.sequence_id: p.why for p in passed_over if p.stage == "give_way"}
    return map(whys.get, plan.preempted)


def _admitted(plan: Plan, request_ids: Iterable[str], block_size: int) -> Iterator[Admitted]:
    for join, request_id in zip(plan.joins, request_ids, strict=True):
        given, shared, swapped_in = blocks_of(join, block_size, plan.swaps)
        yield Admitted(
            sequence_id=join.sequence_id,
            request_id=request_id,
            slot=join.slot,
            tokens=len(join.tokens),
            cached_tokens=join.num_computed_tokens,
            blocks=given,
            shared_blocks=shared,
            swapped_in_blocks=swapped_in,
        )


def waits_of(
    core: Scheduler, passed_over: Iterable[PassedOver], count_max: int = WAITING_TOLD_MAX
) -> tuple[Waits, ...]:
    """Of the queue as it is, each with why it was not scheduled. Dear: about 2 us each."""
    whys = why_it_waits(passed_over)
    return tuple(
        Waits(sequence.sequence_id, sequence.live.request.id, *whys(sequence))
        for sequence in islice(core.waiting, count_max)
    )


def _named(passed_over: Iterable[PassedOver]) -> Iterator[Waits]:
    looks = (over for over in passed_over if over.stage in QUEUE_STAGES)
    for over in islice(looks, WAITING_TOLD_MAX):
        if over.sequence_id is not None:
            yield Waits(over.sequence_id, "", over.why.value, None)


def _request_id(sequence: Sequence | None) -> str:
    return "" if sequence is None else sequence.live.request.id
