"""The real core and a worker in virtual time, event by event.

    arrival ─► Submit ─┐                        ┌─► plan reaches the worker ─► steps, one by one
                       ├─► MakePlan, while due ─┤
    result  ─► StepDone┘                        └─► result reaches the core, a latency later

The worker runs on by its lease, sees a newer plan between two steps, and takes for each step what
`Costs` says of its rows, contexts and chunks.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.modes.costs import Costs
from benchmarks.modes.laws import Job
from scheduler_svc.core.commands import (
    Command,
    Configured,
    MakePlan,
    StepDone,
    Submit,
    WorkerJoined,
)
from scheduler_svc.core.outcome import Outcome, Plan, RequestOver
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Reason, Request, StepResult, WorkerSpec

WORKER = "w"


@dataclass(slots=True)
class Row:
    """What the worker must know of a member: tokens to go, to make, and in the KV cache."""

    gap: int
    tokens_left: int
    num_computed_tokens: int
    reason: Reason


@dataclass
class Worker:
    """Takes plans, answers with token 1."""

    costs: Costs
    jobs: Mapping[int, Job]
    rows: dict[int, Row] = field(default_factory=dict)
    inbox: deque[Plan] = field(default_factory=deque)
    plan: Plan | None = None
    step: int = 0

    def begin(self) -> tuple[int, StepResult] | None:
        """The next step: how long it takes, and what it brings. None: there is none."""
        if self.inbox and (self.plan is None or self.step > 0):
            self._apply(self.inbox.popleft())
        if (plan := self.plan) is None:
            return None
        shares = dict(plan.chunks) if self.step == 0 else {}
        chunks: list[tuple[int, int]] = []
        decodes = contexts = 0
        slots, finished = [], {}
        for slot, row in self.rows.items():
            count = shares.get(slot, 1 if row.gap == 1 else 0)
            if not count or not row.tokens_left:
                continue
            if slot in shares:
                chunks.append((count, row.num_computed_tokens))
            else:
                decodes += 1
                contexts += row.num_computed_tokens
            row.gap -= count
            row.num_computed_tokens += count
            if row.gap:
                continue
            row.gap = 1
            row.tokens_left -= 1
            slots.append(slot)
            if not row.tokens_left:
                finished[slot] = row.reason
        took_ns = self.costs.step(decodes, contexts, chunks)
        result = StepResult(
            worker_id=WORKER,
            plan_id=plan.plan_id,
            step=self.step,
            slots=tuple(slots),
            tokens=(1,) * len(slots),
            finished=finished,
            is_last=self._is_last(plan),
            step_us=took_ns // 1000,
        )
        self.step += 1
        if result.is_last:
            self.plan = None
        return took_ns, result

    def _is_last(self, plan: Plan) -> bool:
        goes_on = any(row.gap == 1 and row.tokens_left for row in self.rows.values())
        return self.step + 1 >= plan.lease_steps or not goes_on

    def _apply(self, plan: Plan) -> None:
        for slot in plan.leaves:
            del self.rows[slot]
        for join in plan.joins:
            job = self.jobs[join.sequence_id]
            is_cut = job.output_tokens == job.request.max_tokens
            made = len(join.tokens) - join.num_prompt_tokens
            self.rows[join.slot] = Row(
                gap=len(join.tokens) - join.num_computed_tokens,
                tokens_left=job.output_tokens - made,
                num_computed_tokens=join.num_computed_tokens,
                reason=Reason.LENGTH if is_cut else Reason.STOP,
            )
        self.plan, self.step = plan, 0


@dataclass
class Run:
    """One trace under one configuration; afterwards its fields tell what happened."""

    costs: Costs
    spec: WorkerSpec
    configured: Configured
    jobs: Sequence[Job]
    # Nothing after it is looked at; None: until everything has ended.
    until_ns: int | None = None
    # First tokens of this tenant are all that is asked: nothing after the last is looked at.
    until_answered: str | None = None
    # By sequence: when its tokens came, and how long it waited, each time.
    token_ns: dict[int, list[int]] = field(default_factory=dict)
    waits_ns: dict[int, list[int]] = field(default_factory=dict)
    overs: dict[int, RequestOver] = field(default_factory=dict)
    # Tokens computed, by tenant; of a prompt when it is answered.
    served: dict[str, int] = field(default_factory=dict)
    plans: int = 0
    # Plans with which somebody joined.
    admissions: int = 0
    steps: int = 0
    preemptions: int = 0
    # Joins past somebody who came before and has waited longer than is promised.
    overtakes: int = 0
    busy_ns: int = 0
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.by_id = {job.request.sequence_id: job.request for job in self.jobs}
        self.core = Scheduler()
        self.worker = Worker(self.costs, {job.request.sequence_id: job for job in self.jobs})
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._is_computing = False
        self._unanswered = self._of(self.until_answered) if self.until_answered else None
        # Since when it waits.
        self._waiting_ns: dict[int, int] = {}

    def play(self) -> "Run":
        """To the end."""
        self._tell(self.configured)
        self._tell(WorkerJoined(worker_id=WORKER, spec=self.spec))
        for one in self.by_id.values():
            self._at(one.arrived_ns, lambda one=one: self._arrive(one))  # type: ignore[misc]
        while self._events and (self.until_ns is None or self._events[0][0] <= self.until_ns):
            self.now_ns, _, happen = heapq.heappop(self._events)
            happen()
            if self._unanswered is not None and not self._unanswered:
                return self
        assert self.until_ns is not None or len(self.overs) == len(self.jobs), self.core
        return self

    def _of(self, tenant: str) -> set[int]:
        return {sequence_id for sequence_id, one in self.by_id.items() if one.tenant == tenant}

    def _at(self, at_ns: int, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ns, next(self._number), happen))

    def _arrive(self, one: Request) -> None:
        self._waiting_ns[one.sequence_id] = self.now_ns
        self._tell(Submit(request=one))

    def _tell(self, command: Command) -> None:
        """And ask for plans, as long as there are."""
        outcome = self.core.apply(command, self.now_ns)
        self._hear(outcome)
        while outcome.workers:
            overdue = self.core.waiting.overdue(self.now_ns)
            outcome = self.core.apply(MakePlan(worker_id=WORKER), self.now_ns)
            if (plan := outcome.plan) is None:
                return
            self._note(plan, {s.sequence_id: s.live.request.arrived_ns for s in overdue})
            self._at(self.now_ns + self.costs.latency_ns, lambda plan=plan: self._take(plan))  # type: ignore[misc]

    def _note(self, plan: Plan, overdue: dict[int, int]) -> None:
        self.plans += 1
        self.admissions += bool(plan.joins)
        self.preemptions += len(plan.preempted)
        for sequence_id in plan.preempted:
            self._waiting_ns[sequence_id] = self.now_ns
        for sequence_id in plan.admitted:
            overdue.pop(sequence_id, None)
            arrived_ns = self.by_id[sequence_id].arrived_ns
            self.overtakes += any(before_ns < arrived_ns for before_ns in overdue.values())
            waited_ns = self.now_ns - self._waiting_ns.pop(sequence_id)
            self.waits_ns.setdefault(sequence_id, []).append(waited_ns)

    def _take(self, plan: Plan) -> None:
        self.worker.inbox.append(plan)
        if not self._is_computing:
            self._step()

    def _step(self) -> None:
        begun = self.worker.begin()
        self._is_computing = begun is not None
        if begun is None:
            return
        took_ns, result = begun
        self.busy_ns += took_ns
        self.steps += 1
        self._at(self.now_ns + took_ns, self._step)
        latency_ns = self.costs.latency_ns
        self._at(self.now_ns + took_ns + latency_ns, lambda: self._tell(StepDone(result=result)))

    def _hear(self, outcome: Outcome) -> None:
        for sequence_id in outcome.tokens.sequence_ids if outcome.tokens else ():
            times = self.token_ns.setdefault(sequence_id, [])
            one = self.by_id[sequence_id]
            self.served[one.tenant] = (
                self.served.get(one.tenant, 0) + 1 + len(one.prompt) * (not times)
            )
            if not times and self._unanswered is not None:
                self._unanswered.discard(sequence_id)
            times.append(self.now_ns)
        for event in outcome.events:
            if isinstance(event, RequestOver):
                assert event.endings[0].reason in (Reason.LENGTH, Reason.STOP), event
                self.overs[event.sequence_id] = event
