"""Steps as they are answered, for those who watch. Pure.

Of a step is kept what its plan remembers anyway: the batch as of the plan, which nothing changes.
Only who tells of it compares one step with the next.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from scheduler_svc.core.blocks import BlockCounts
from scheduler_svc.core.outcome import PassedOver, Plan, Why
from scheduler_svc.core.requests import Residency
from scheduler_svc.core.types import SequenceId, SlotIndex, StepResult
from scheduler_svc.core.workers import Flight, Worker
from scheduler_svc.decisions import budget_of, expected_of, whys_of

# Of all workers.
STEPS_MAX: Final = 512
# Plans, of which steps may still be answered: of a worker there are three at most.
PLANS_MAX: Final = 1024


class PlanNote(NamedTuple):
    """What only the plan knew, and whoever made it. `preempted`: each with why."""

    preempted: tuple[tuple[SequenceId, Why], ...] = ()
    blocks_free: int = 0
    waiting: int = 0
    lease_steps: int = 0
    # Tokens that its first step might have had.
    budget: int = 0
    num_cached_tokens: int = 0
    # Since the worker's plan before.
    blocks: BlockCounts = BlockCounts()
    # A first step, and those after it.
    expected_us: tuple[int, int] = (0, 0)


NO_NOTE: Final = PlanNote()


class StepNote(NamedTuple):
    """One step. `chunks` are of its plan's first step, and so is `plan`."""

    worker_id: str
    answered_ns: int
    members: Mapping[SlotIndex, Residency]
    chunks: Mapping[SlotIndex, int]
    result: StepResult
    plan: PlanNote
    expected_us: int


class LiveSteps:
    """The newest of a leadership, numbered from 1, for as long as somebody watches."""

    def __init__(self) -> None:
        self.count = 0
        self._steps: deque[StepNote] = deque(maxlen=STEPS_MAX)
        self._plans: OrderedDict[tuple[str, int], PlanNote] = OrderedDict()
        # Of each worker's pool, as of its newest plan; kept while nobody watches, too: the first
        # plan that is seen is told against the one before it.
        self._counts: WeakKeyDictionary[Worker, BlockCounts] = WeakKeyDictionary()

    def planned(
        self, worker: Worker, plan: Plan, passed_over: Iterable[PassedOver], *, is_seen: bool
    ) -> None:
        """Just now. Of one that nobody sees only the pool's counts are kept."""
        before = self._counts.get(worker, BlockCounts())
        self._counts[worker] = worker.kv.counts
        if not is_seen:
            return
        note = note_of(worker, plan, passed_over, before)
        self._plans[plan.worker_id, plan.plan_id] = note
        if len(self._plans) > PLANS_MAX:
            self._plans.popitem(last=False)

    def stepped(self, flight: Flight, result: StepResult, now_ns: int) -> None:
        """`flight`: the plan that the result, which was believed, belongs to."""
        note = self._plans.get((result.worker_id, result.plan_id), NO_NOTE)
        self._steps.append(step_of(flight, result, note, now_ns))
        self.count += 1

    def forget(self) -> None:
        """Nobody watches any more. The numbers go on."""
        self._steps.clear()
        self._plans.clear()

    def between(self, after: int, last: int) -> list[StepNote]:
        """Those behind number `after`, up to `last`, as far as they are there."""
        oldest = self.count - len(self._steps) + 1
        first = max(0, after + 1 - oldest)
        return list(islice(self._steps, first, max(first, last + 1 - oldest)))


def note_of(
    worker: Worker, plan: Plan, passed_over: Iterable[PassedOver], before: BlockCounts
) -> PlanNote:
    """A plan as it was just made; `before`: of the worker's pool, as of the plan before it."""
    whys = (why or Why.BLOCKS for why in whys_of(plan, passed_over))
    return PlanNote(
        preempted=tuple(zip(plan.preempted, whys, strict=True)),
        blocks_free=plan.blocks_free,
        waiting=plan.waiting,
        lease_steps=plan.lease_steps,
        budget=budget_of(plan, worker.spec),
        num_cached_tokens=sum(join.num_computed_tokens for join in plan.joins),
        blocks=worker.kv.counts.since(before),
        expected_us=expected_of(plan, worker),
    )


def step_of(flight: Flight, result: StepResult, note: PlanNote, now_ns: int) -> StepNote:
    """`note`: of its plan."""
    first_us, other_us = note.expected_us
    if result.step:
        return StepNote(result.worker_id, now_ns, flight.members, {}, result, NO_NOTE, other_us)
    chunks = flight.chunks
    return StepNote(result.worker_id, now_ns, flight.members, chunks, result, note, first_us)


def flight_of(worker: Worker, plan_id: int) -> Flight | None:
    """A plan in flight."""
    return next((flight for flight in worker.flights if flight.plan_id == plan_id), None)
