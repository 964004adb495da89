"""Steps as they are answered, for those who watch. Pure.

Of a step is kept what its plan remembers anyway: the batch as of the plan, which nothing changes.
Only who tells of it compares one step with the next.
"""

from collections import OrderedDict, deque
from collections.abc import Mapping
from itertools import islice
from typing import Final, NamedTuple

from scheduler_svc.core.outcome import Plan
from scheduler_svc.core.requests import Residency
from scheduler_svc.core.types import SequenceId, SlotIndex, StepResult
from scheduler_svc.core.workers import Flight, Worker

# Of all workers.
STEPS_MAX: Final = 512
# Plans whose first step has not been answered; of a worker there are three at most.
PLANS_MAX: Final = 1024


class PlanNote(NamedTuple):
    """What only the plan knew."""

    preempted: tuple[SequenceId, ...] = ()
    blocks_free: int = 0
    waiting: int = 0


class StepNote(NamedTuple):
    """One step. `chunks` are of its plan's first step, and so is `plan`."""

    worker_id: str
    answered_ns: int
    members: Mapping[SlotIndex, Residency]
    chunks: Mapping[SlotIndex, int]
    result: StepResult
    plan: PlanNote


class LiveSteps:
    """The newest of a leadership, numbered from 1, for as long as somebody watches."""

    def __init__(self) -> None:
        self.count = 0
        self._steps: deque[StepNote] = deque(maxlen=STEPS_MAX)
        self._plans: OrderedDict[tuple[str, int], PlanNote] = OrderedDict()

    def planned(self, plan: Plan) -> None:
        note = PlanNote(plan.preempted, plan.blocks_free, plan.waiting)
        self._plans[plan.worker_id, plan.plan_id] = note
        if len(self._plans) > PLANS_MAX:
            self._plans.popitem(last=False)

    def stepped(self, flight: Flight, result: StepResult, now_ns: int) -> None:
        """`flight`: the plan that the result, which was believed, belongs to."""
        key = result.worker_id, result.plan_id
        note, chunks = (
            (self._plans.pop(key, None), flight.chunks) if not result.step else (None, {})
        )
        self._steps.append(
            StepNote(result.worker_id, now_ns, flight.members, chunks, result, note or PlanNote())
        )
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


def flight_of(worker: Worker, plan_id: int) -> Flight | None:
    """A plan in flight."""
    return next((flight for flight in worker.flights if flight.plan_id == plan_id), None)
