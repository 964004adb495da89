"""What a quiet tenant waits for its first token beside a tenant that floods the cell, in steps.

    python -m benchmarks.core.bench_tenants [--steps 6000] [--save]

The core decides, an echo stands for the worker, and a step is the unit of time, so that the figures
are the same on every machine. The flood keeps 64 requests waiting from the first step on; the quiet
tenant sends one request every 40 steps. Alone, and beside the flood under `fcfs`, under `fair`, and
under `fair` with a bound on what a tenant may have running. What all of it costs is in tokens per
step. The seed is fixed; prompts of 64 to 512 tokens, outputs of 32 to 256.
"""

import argparse
import random
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from benchmarks.core.bench_scheduler import Echo
from benchmarks.recording import record
from scheduler_svc.core.commands import Configured, MakePlan, StepDone, Submit, WorkerJoined
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Config, Request, WorkerSpec

SLOTS: Final = 32
SPEC: Final = WorkerSpec(
    fingerprint="f",
    block_size=16,
    block_count=SLOTS * 32,
    slots_max=SLOTS,
    step_tokens_max=SLOTS + 512,
    vocab_size=2,
)
FLOOD_WAITING: Final = 64
QUIET_EVERY_STEPS: Final = 40
RUNNING_TOKENS_MAX: Final = 8192


@dataclass
class Cell:
    """One simulated cell; the clock is the step."""

    policy: str
    tenant_tokens_max: int | None = None
    step: int = 0
    tokens: int = 0
    arrived: dict[int, int] = field(default_factory=dict)
    waits: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(7)
        self.sequence_ids = count(1)
        self.max_tokens_of: dict[int, int] = {}
        self.echo = Echo(self.max_tokens_of)
        config = Config(tenant_tokens_max=self.tenant_tokens_max)
        self.scheduler = Scheduler()
        self.scheduler.apply(Configured(config=config, policy=self.policy), 0)
        self.scheduler.apply(WorkerJoined(worker_id="w", spec=SPEC), 0)

    def submit(self, tenant: str) -> int:
        sequence_id = next(self.sequence_ids)
        request = Request(
            id=str(sequence_id),
            sequence_id=sequence_id,
            # Its own first block: nobody finds another's prefix.
            prompt=(sequence_id, *range(self.rng.randint(63, 511))),
            max_tokens=self.rng.randint(32, 256),
            arrived_ns=self.step,
            tenant=tenant,
        )
        self.max_tokens_of[sequence_id] = request.max_tokens
        self.scheduler.apply(Submit(request=request), self.step)
        return sequence_id

    def run(self, steps: int, *, is_flooded: bool) -> None:
        for self.step in range(steps):
            while is_flooded and len(self.scheduler.waiting) < FLOOD_WAITING:
                self.submit("flood")
            if self.step % QUIET_EVERY_STEPS == 0:
                self.arrived[self.submit("quiet")] = self.step
            while (
                plan := self.scheduler.apply(MakePlan(worker_id="w"), self.step).plan
            ) is not None:
                self.echo.inbox.append(plan)
            if (result := self.echo.next_result()) is None:
                continue
            brought = self.scheduler.apply(StepDone(result=result), self.step).tokens
            assert brought is not None
            self.tokens += len(brought.tokens)
            for sequence_id in brought.sequence_ids:
                if (arrived := self.arrived.pop(sequence_id, None)) is not None:
                    self.waits.append(self.step + 1 - arrived)

    def figures(self) -> dict[str, object]:
        """`unanswered`: requests of the quiet tenant that have seen no token by the end."""
        waits = sorted(self.waits)
        return {
            "ttft_steps_p50": waits[len(waits) // 2] if waits else None,
            "ttft_steps_p99": waits[int(0.99 * (len(waits) - 1))] if waits else None,
            "answered": len(waits),
            "unanswered": len(self.arrived),
            "tokens_per_step": round(self.tokens / (self.step + 1), 2),
        }


# Policy, bound on running tokens, and whether there is a flood.
CASES: Final = {
    "alone": ("fcfs", None, False),
    "fcfs": ("fcfs", None, True),
    "fair": ("fair", None, True),
    "fair, bounded": ("fair", RUNNING_TOKENS_MAX, True),
}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"steps": arguments.steps, "slots": SLOTS}
    for name, (policy, bound, is_flooded) in CASES.items():
        cell = Cell(policy=policy, tenant_tokens_max=bound)
        cell.run(arguments.steps, is_flooded=is_flooded)
        figures[name] = cell.figures()
    record("tenants", figures, save=arguments.save)


if __name__ == "__main__":
    main()
