"""Requests through the scheduler's core: plans go out as messages, results come in. No torch."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpu_worker.draft import RowLimits
from protos.kaiten.v1 import common_pb2, worker_service_pb2
from scheduler_svc.core.policies import POLICIES
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Config, Plan, Request, StepResult, WorkerSpec

WORKER = "worker"
LEADER = common_pb2.Leader(epoch=1, nonce=7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    prompt: tuple[int, ...]
    output: int


def jobs_uniform(count: int, low: int, high: int, vocab: int) -> list[Job]:
    """Input and output lengths uniform from low to high, seed 0."""
    rng = random.Random(0)
    return [
        Job(
            prompt=tuple(rng.randrange(vocab) for _ in range(rng.randint(low, high))),
            output=rng.randint(low, high),
        )
        for _ in range(count)
    ]


class Crowd:
    """All jobs, due at once. `next_plan` until None, `take` every result, until `is_done`."""

    def __init__(self, limits: RowLimits, jobs: Sequence[Job]) -> None:
        self._scheduler = Scheduler(Config(), POLICIES["fcfs"])
        self.outputs: list[list[int]] = [[] for _ in jobs]
        self._jobs = jobs
        spec = WorkerSpec(
            fingerprint="bench",
            block_size=limits.block_size,
            block_count=limits.block_count,
            slots_max=limits.slots,
            step_tokens_max=limits.step_tokens,
            vocab_size=limits.vocab_size,
            context_tokens_max=limits.context_tokens,
        )
        self._scheduler.worker_joined(WORKER, spec, now_ns=0)
        for serial, job in enumerate(jobs):
            request = Request(
                id=str(serial),
                serial=serial,
                prompt=job.prompt,
                max_tokens=job.output,
                arrived_ns=0,
            )
            self._scheduler.submit(request, now_ns=0)

    @property
    def is_done(self) -> bool:
        return self._scheduler.live_count == 0

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    def next_plan(self) -> worker_service_pb2.Plan | None:
        plan = self._scheduler.plan(WORKER, now_ns=time.monotonic_ns())
        return None if plan is None else self._message(plan)

    def take(self, result: StepResult) -> None:
        committed = self._scheduler.commit(result, now_ns=time.monotonic_ns())
        for serial, token in zip(committed.serials, committed.tokens, strict=True):
            self.outputs[serial].append(token)

    def _message(self, plan: Plan) -> worker_service_pb2.Plan:
        return worker_service_pb2.Plan(
            leader=LEADER,
            plan_id=plan.plan_id,
            lease_steps=plan.lease_steps,
            leaves=plan.leaves,
            joins=[
                worker_service_pb2.Join(
                    slot=join.slot,
                    serial=join.serial,
                    token_ids=join.tokens,
                    prompt_tokens=join.prompt_tokens,
                    tokens_done=join.tokens_done,
                    blocks=join.blocks,
                    sampling=worker_service_pb2.RowSampling(
                        top_p=1.0, max_tokens=self._jobs[join.serial].output, logprobs=-1,
                        repetition_penalty=1.0,
                    ),
                    explain_from=join.explain_from,
                )
                for join in plan.joins
            ],
            append_slots=[slot for slot, _ in plan.appends],
            append_blocks=[block for _, block in plan.appends],
            copy_sources=[source for source, _ in plan.copies],
            copy_targets=[target for _, target in plan.copies],
            chunk_slots=[slot for slot, _ in plan.chunks],
            chunk_tokens=[count for _, count in plan.chunks],
            membership_checksum=plan.checksum,
        )  # fmt: skip
