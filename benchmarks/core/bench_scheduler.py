"""Time of one scheduling decision, in microseconds per running sequence and step.

    python -m benchmarks.core.bench_scheduler [--rows 1,16,64,256,1024] [--steps 400] [--save]

What is timed is the core alone, `MakePlan` and `StepDone`, in CPU time, so that other work on the
machine counts little; the worker is an echo that answers at once and is not timed. Three loads:

steady   nobody waits, so plans carry a lease of 8 steps
crowded  all seats are taken and somebody always waits: a plan for every step, two in flight,
         and whoever finishes is replaced
mixed    as crowded, and one row in eight is always in the middle of a long prompt

Goal: at most 3 us at 256 rows (vLLM's scheduler was measured at about 12.7 us per running request
and step, on another machine).
"""

import argparse
import gc
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from time import thread_time_ns

from benchmarks.recording import record
from scheduler_svc.core.commands import Configured, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.outcome import Finished, Outcome, Plan
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Config, Reason, Request, StepResult, WorkerSpec

BLOCK_SIZE = 16
LONG_PROMPT_TOKENS = 4096


@dataclass(slots=True)
class Row:
    """What the echo must know of a member to answer as the protocol wants."""

    gap: int
    tokens_left: int


@dataclass
class Echo:
    """Answers every plan at once with token 1; keeps just enough of the batch to do so."""

    max_tokens_of: dict[int, int]
    rows: dict[int, Row] = field(default_factory=dict)
    inbox: deque[Plan] = field(default_factory=deque)
    plan: Plan | None = None
    step: int = 0

    def next_result(self) -> StepResult | None:
        if self.inbox and (self.plan is None or self.step > 0):
            self._apply(self.inbox.popleft())
        if (plan := self.plan) is None:
            return None
        chunks = dict(plan.chunks) if self.step == 0 else {}
        slots, finished = [], {}
        for slot, row in self.rows.items():
            row.gap -= chunks.get(slot, 1 if row.gap == 1 else 0)
            if row.gap > 0 or row.tokens_left == 0:
                continue
            row.gap = 1
            row.tokens_left -= 1
            slots.append(slot)
            if row.tokens_left == 0:
                finished[slot] = Reason.LENGTH
        step, self.step = self.step, self.step + 1
        if is_last := self.step == plan.lease_steps:
            self.plan = None
        return StepResult(
            worker_id="w",
            plan_id=plan.plan_id,
            step=step,
            slots=tuple(slots),
            tokens=(1,) * len(slots),
            finished=finished,
            is_last=is_last,
        )

    def _apply(self, plan: Plan) -> None:
        for slot in plan.leaves:
            del self.rows[slot]
        for join in plan.joins:
            left = self.max_tokens_of[join.sequence_id] - (
                len(join.tokens) - join.num_prompt_tokens
            )
            self.rows[join.slot] = Row(
                gap=len(join.tokens) - join.num_computed_tokens, tokens_left=left
            )
        self.plan, self.step = plan, 0


class Bench:
    """One load at one batch size."""

    def __init__(self, load: str, rows: int, steps: int) -> None:
        self.load, self.rows, self.steps = load, rows, steps
        self.scheduler = Scheduler()
        self.scheduler.apply(Configured(config=Config(), policy="fcfs"), 0)
        self.max_tokens_of: dict[int, int] = {}
        self.echo = Echo(self.max_tokens_of)
        self.sequence_ids = count(1)
        self.live = 0
        spec = WorkerSpec(
            fingerprint="f",
            block_size=BLOCK_SIZE,
            block_count=rows * 96 + (rows // 8 + 1) * (LONG_PROMPT_TOKENS // BLOCK_SIZE) + 512,
            slots_max=rows,
            step_tokens_max=rows + 2048,
            vocab_size=2,
        )
        self.scheduler.apply(WorkerJoined(worker_id="w", spec=spec), 0)

    def run(self) -> list[float]:
        """Microseconds of plan + commit of every timed step."""
        self._fill()
        for _ in range(1000):
            self.step()
            worker = self.scheduler.workers["w"]
            if self.load == "mixed" or (
                len(worker.running) == self.rows
                and all(s.gap == 1 for s in worker.running.values())
            ):
                break
        gc.collect()
        gc.freeze()
        timings = [self.step() for _ in range(self.steps)]
        gc.unfreeze()
        return timings

    def planned(self, plan: Plan) -> None:
        """For who keeps plans; it is not timed."""

    def stepped(self, result: StepResult) -> None:
        """The core is about to be told of it."""

    def step(self) -> float:
        """One step, planned and committed; the microseconds that took."""
        spent_ns = 0
        while True:
            start_ns = thread_time_ns()
            plan = self.scheduler.apply(MakePlan(worker_id="w"), 0).plan
            spent_ns += thread_time_ns() - start_ns
            if plan is None:
                break
            self.planned(plan)
            self.echo.inbox.append(plan)
        result = self.echo.next_result()
        assert result is not None, "the load keeps the worker busy"
        self.stepped(result)
        start_ns = thread_time_ns()
        outcome = self.scheduler.apply(StepDone(result=result), 0)
        spent_ns += thread_time_ns() - start_ns
        self._replace(outcome)
        return spent_ns / 1000

    def _replace(self, outcome: Outcome) -> None:
        self.live -= sum(isinstance(event, Finished) for event in outcome.events)
        if self.load != "steady":
            self._fill()

    def _fill(self) -> None:
        target = self.rows if self.load == "steady" else self.rows + max(2, self.rows // 8)
        while self.live < target:
            sequence_id = next(self.sequence_ids)
            is_long = self.load == "mixed" and sequence_id % 8 == 0
            num_prompt_tokens = LONG_PROMPT_TOKENS if is_long else 64
            steady_tokens = self.steps + 1000
            request = Request(
                id=str(sequence_id),
                sequence_id=sequence_id,
                prompt=tuple((sequence_id * 7919 + i) % 30000 for i in range(num_prompt_tokens)),
                max_tokens=steady_tokens if self.load == "steady" else 100 + sequence_id * 37 % 100,
                arrived_ns=0,
                tenant=str(sequence_id),
            )
            self.max_tokens_of[sequence_id] = request.max_tokens
            self.scheduler.apply(Submit(request=request), 0)
            self.live += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="1,16,64,256,1024")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    args = parser.parse_args()
    measured = []
    print(f"{'load':8} {'rows':>5} {'us/step p50':>12} {'mean':>8} {'us/row/step':>12}")
    for load in ("steady", "crowded", "mixed"):
        for rows in map(int, args.rows.split(",")):
            timings = Bench(load, rows, args.steps).run()
            mean_us = sum(timings) / len(timings)
            measured.append(
                {
                    "load": load,
                    "rows": rows,
                    "steps": len(timings),
                    "step_us_p50": round(median(timings), 2),
                    "step_us_mean": round(mean_us, 2),
                    "row_step_us_mean": round(mean_us / rows, 3),
                }
            )
            print(
                f"{load:8} {rows:5} {median(timings):12.1f} {mean_us:8.1f} {mean_us / rows:12.2f}",
                flush=True,
            )
    record("scheduler_core", {"results": measured}, save=args.save)


if __name__ == "__main__":
    main()
