"""The worker's loop with nothing around it: scheduler core, rows and device in one process.

    python -m benchmarks.serving.bare_loop --model FOLDER --jobs FILE --out FILE --concurrency 16

No store, no sockets, no threads of our own, no text: one plan of one step, one step, one commit,
again. What the whole stack needs beyond this is what the services cost (`service_cost`). A job's
tokens arrive when their step is booked.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from gpu_worker.service import runtime

runtime.prepare()  # Before torch is imported, as in a worker.
runtime.take_short_turns()

from benchmarks.serving.one_process import WORKER, spec_of, to_core, to_worker  # noqa: E402
from gpu_worker.batch.plan_validation import RowLimits  # noqa: E402
from gpu_worker.batch.plans import StepOutcome  # noqa: E402
from gpu_worker.batch.rows import Rows  # noqa: E402
from gpu_worker.batch.step_types import AheadRunner, ModelRunner  # noqa: E402
from gpu_worker.runner.eager_runner import EagerRunner  # noqa: E402
from gpu_worker.service.loading import load  # noqa: E402
from gpu_worker.settings import WorkerSettings  # noqa: E402
from scheduler_svc.core.commands import (  # noqa: E402
    Configured,
    MakePlan,
    StepDone,
    Submit,
    WorkerJoined,
)
from scheduler_svc.core.outcome import Outcome, RequestOver  # noqa: E402
from scheduler_svc.core.scheduler import Scheduler  # noqa: E402
from scheduler_svc.core.types import Config, Request  # noqa: E402

WARM_TOKENS = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A job as it is asked for here: no stop token, greedy."""

    prompt: tuple[int, ...]
    output_tokens: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Story:
    """When a job was asked and when its tokens came, in seconds of the run."""

    due_s: float
    arrivals_s: list[float] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, kw_only=True)
class Steps:
    """What the device says of its steps."""

    count: int = 0
    computing_s: float = 0.0


class BareLoop:
    """One core and one device; `run` serves jobs to their ends."""

    def __init__(self, device: ModelRunner, limits: RowLimits) -> None:
        self.steps = Steps()
        self._rows = Rows(dataclasses.replace(limits, reads_grammars=False))
        self._device = device
        # One step per plan and one plan in flight: the loop answers before it plans again.
        config = Config(lease_steps_max=1, plans_in_flight_max=1)
        self._core = Scheduler()
        self._core.apply(Configured(config=config, policy="fcfs"), 0)
        self._core.apply(WorkerJoined(worker_id=WORKER, spec=spec_of(limits)), 0)
        self._asked: dict[int, Asked] = {}
        self._sequence_id = 0

    def run(self, jobs: list[Asked], concurrency: int) -> list[Story]:
        """`concurrency` askers share the jobs, each asking again when it is answered."""
        started_s = time.perf_counter()
        left = iter(jobs)
        stories: dict[int, Story] = {}
        self.steps = Steps()
        for _ in range(concurrency):
            self._ask_next(left, stories, 0.0)
        while self._core.live_count:
            outcome = self._turn()
            assert outcome.tokens is not None
            now_s = time.perf_counter() - started_s
            for sequence_id in outcome.tokens.sequence_ids:
                stories[sequence_id].arrivals_s.append(now_s)
            for event in outcome.events:
                if isinstance(event, RequestOver):
                    self._ask_next(left, stories, now_s)
        return [stories[sequence_id] for sequence_id in sorted(stories)]

    def _ask_next(self, left: Iterator[Asked], stories: dict[int, Story], now_s: float) -> None:
        if (asked := next(left, None)) is None:
            return
        self._sequence_id += 1
        self._asked[self._sequence_id] = asked
        stories[self._sequence_id] = Story(due_s=now_s)
        request = Request(
            id=str(self._sequence_id),
            sequence_id=self._sequence_id,
            prompt=asked.prompt,
            max_tokens=asked.output_tokens,
            arrived_ns=self._sequence_id,
        )
        self._core.apply(Submit(request=request), 0)

    def _turn(self) -> Outcome:
        """One step, planned, computed and booked."""
        plan = self._core.apply(MakePlan(worker_id=WORKER), 0).plan
        assert plan is not None, "what runs needs a plan after every step"
        counts = self._rows.apply(to_worker(plan, self._output_of))
        if plan.swaps:
            self._device.swap_blocks(plan.swaps)
        if plan.copies:
            self._device.copy_blocks(plan.copies)
        inputs = self._rows.step_inputs(counts)
        outcome = StepOutcome(slots=(), token_ids=())
        if inputs.row_count:
            samples = self._device.execute(inputs)
            outcome = self._rows.advance(inputs, samples)
            self.steps.count += 1
            self.steps.computing_s += (samples.forward_us + samples.sample_us) / 1e6
        result = to_core(plan.plan_id, 0, outcome, is_last=True)
        return self._core.apply(StepDone(result=result), 0)

    def _output_of(self, sequence_id: int) -> int:
        return self._asked[sequence_id].output_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--jobs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--concurrency", type=int, required=True)
    parser.add_argument("--dtype", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=512)
    chosen = parser.parse_args()
    settings = WorkerSettings(
        model=chosen.model,
        device="cpu",
        dtype=chosen.dtype,
        threads=chosen.threads,
        slots=chosen.slots,
        step_tokens=chosen.step_tokens,
    )
    loaded = load(settings)
    assert not isinstance(loaded.runner, AheadRunner), "the loop takes turns with its device"
    assert isinstance(loaded.runner, EagerRunner), "on a CPU steps are computed in turn"
    loop = BareLoop(loaded.runner, loaded.limits)
    jobs = [
        Asked(prompt=tuple(job["prompt"]), output_tokens=job["output_tokens"])
        for job in json.loads(chosen.jobs.read_text())
    ]
    loop.run([Asked(prompt=(5,) * 16, output_tokens=WARM_TOKENS)], 1)
    used_s = time.process_time()
    stories = loop.run(jobs, chosen.concurrency)
    told = {
        "cpu_s": time.process_time() - used_s,
        "rss_mb": round(psutil.Process().memory_info().rss / 2**20, 1),
        "steps": dataclasses.asdict(loop.steps),
        "stories": [dataclasses.asdict(story) for story in stories],
    }
    chosen.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
