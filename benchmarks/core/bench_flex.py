"""What the lines of a batch take from live requests, by the decisions of the scheduler alone.

    python -m benchmarks.core.bench_flex [--lines 50000] [--save]
    python -m benchmarks.core.bench_flex --every-load [--seconds 60] [--save]

The real core before one worker whose steps take a base and so much for each token, in a time of its
own: the same figures on every machine, whatever else runs there. What gateway, store and clients
add is measured by `benchmarks.serving.batches`. Live streams come and go, alone and beside a batch
that always has two lines for each slot: the time to their first token, the gaps between tokens, and
how much of the room the lines used.

The room of a step is what the gap leaves beside the step's own live tokens: nothing where those
take the gap by themselves. Counted are steps that compute something for a live request while a line
waits; a step longer than the gap does not make up for a shorter one. `step_of_gap` is the mean step
while a live request is there, over the gap: what `room_used` was in records without it.

Plans and results are under way for a while, and a plan that comes late finds its worker idle. Of a
short prompt the first token is little but steps of others: how much later it comes beside a batch,
`first_p99_later_in_gaps` says in gaps.

The first seconds are not counted, alone or beside: all streams begin at once there, on a worker of
which nothing is known, and how much those few requests are of a hundred is the load's, not theirs.
Records without `warm_s` count them.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from statistics import mean, quantiles
from typing import Any, Final

from benchmarks.recording import record
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Event, Finished, Outcome, Plan, RequestOver, StepTokens
from scheduler_svc.core.types import FLEX_PRIORITY, StepResult
from tests.fakes.model_worker import ModelWorker, Row
from tests.support.cell import Cell, spec

WARM_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Times in ms and us; a stream asks anew so long after its last answer, in the mean."""

    name: str = "chats"
    seed: int = 7
    gap_ms: float = 10.0
    has_target: bool = True
    base_us: int = 2000
    token_us: int = 100
    noise_percent: int = 0
    slots: int = 128
    step_tokens: int = 428
    streams: int = 4
    prompt: int = 1000
    tokens: int = 96
    pause_ms: float = 300.0
    line_prompt: int = 6
    line_tokens: int = 24
    # From scheduler to worker, and back.
    way_us: int = 200
    # What a first token takes outside of both, alone and beside alike.
    front_ms: float = 0.0


CHATS: Final = Load()
# Short prompts: what a first token takes is then the steps that are under way.
SHORT: Final = {"prompt": 20, "pause_ms": 20.0}
# What the shipped model's steps took on two cores, and its requests outside of them, in the median.
REAL: Final = {
    "base_us": 1700,
    "token_us": 230,
    "gap_ms": 15.0,
    "prompt": 6,
    "pause_ms": 2.0,
    "way_us": 1000,
    "front_ms": 40.0,
}
# The same prices as 300 tokens in 100 ms on a CPU, and 4000 in 80 on a GPU.
CPU: Final = {"base_us": 10_000, "token_us": 400, "gap_ms": 50.0, "slots": 128}
GPU: Final = {"base_us": 6000, "token_us": 18, "gap_ms": 12.0, "slots": 512, "step_tokens": 2560}
LOADS: Final = (
    CHATS,
    Load(name="chats, another seed", seed=8),
    Load(name="chats, a third seed", seed=9),
    Load(name="no target", has_target=False),
    Load(name="twice the gap", gap_ms=20.0, slots=256, step_tokens=556),
    Load(name="a short gap", gap_ms=6.0),
    Load(name="steps that vary by 5 %", noise_percent=5),
    Load(name="prompts of 300", prompt=300, seed=11),
    Load(name="twelve streams", streams=12, pause_ms=2000.0, seed=12),
    Load(name="hardly a pause", pause_ms=20.0, seed=13),
    Load(name="lines of 100 and 200", line_prompt=100, line_tokens=200, seed=14),
    Load(name="lines of 400 and 8", line_prompt=400, line_tokens=8, seed=15),
    Load(name="prices of a CPU", seed=16, **CPU),  # type: ignore[arg-type]
    Load(name="prices of a GPU", seed=17, prompt=4000, **GPU),  # type: ignore[arg-type]
    Load(name="prices of a GPU, long lines", seed=18, prompt=4000, line_tokens=400, **GPU),  # type: ignore[arg-type]
    Load(name="short prompts", seed=21, **SHORT),  # type: ignore[arg-type]
    Load(name="short prompts, twelve streams", seed=22, streams=12, **SHORT),  # type: ignore[arg-type]
    Load(name="short prompts, short answers", seed=23, tokens=24, **SHORT),  # type: ignore[arg-type]
    Load(name="short prompts, a far worker", seed=24, **{**SHORT, "way_us": 1500}),  # type: ignore[arg-type]
    Load(name="prices of the shipped model", seed=25, **REAL),  # type: ignore[arg-type]
    Load(name="the same, steps vary by 30 %", seed=26, noise_percent=30, **REAL),  # type: ignore[arg-type]
)


@dataclass
class TimedWorker(ModelWorker):
    """It has no KV to check: what it says does not matter here, and what it takes does."""

    # Of the step: whose tokens, and how many.
    computed: list[tuple[int, int]] = field(default_factory=list)
    # A plan is on its way.
    on_plan: Callable[[Plan], None] = print

    def send(self, plan: Plan) -> None:
        self.on_plan(plan)

    def _compute(self, row: Row, count: int) -> int:
        self.computed.append((row.sequence_id, count))
        row.num_computed_tokens += count
        return 0

    def _next_token(self, state: int, row: Row) -> int:
        return 1

    def _check_tables(self) -> None:
        return

    def _replace(self, row: Row, index: int, block: int, group: int) -> None:
        row.blocks[group][index] = block


class Fast(Cell):
    """Nothing is checked but that everybody ends."""

    # When to ask again for a plan for which it was early.
    again_ns: int | None = None

    def apply(self, command: Command) -> Outcome:
        outcome = self.scheduler.apply(command, self.now_ns)
        self.hear(outcome.events)
        self.see(command, outcome)
        self.again_ns = outcome.again_ns
        return outcome

    def hear(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.endings[event.sequence_id] = event
            elif isinstance(event, RequestOver):
                del self.requests[event.sequence_id]


class Day:
    """Live streams, and lines beside them."""

    def __init__(self, load: Load, lines: int) -> None:
        self.load, self.gap_us = load, round(1000 * load.gap_ms)
        worker = spec(slots=load.slots, step_tokens=load.step_tokens, blocks=60_000)
        target_us = self.gap_us if load.has_target else None
        self.cell = Fast(worker, batch_gap_us=self.gap_us, itl_target_us=target_us)
        self.worker = TimedWorker("w1", worker, self.cell.max_tokens_of, stop_every=0)
        self.worker.on_plan = lambda plan: self._later(load.way_us, partial(self._take, plan))
        self.worker.base_us, self.worker.token_us = load.base_us, load.token_us
        self.cell.workers["w1"] = self.worker
        self.lines_left, self.live_lines = lines, set[int]()
        # When, and by which stream.
        self.arrived: dict[int, tuple[int, int]] = {}
        self.last: dict[int, int] = {}
        self.first_ms: list[float] = []
        self.gap_ms: list[float] = []
        self.shared_us: list[int] = []
        self.room_us = self.used_us = 0
        self._noise = random.Random(load.seed)
        streams = range(load.streams)
        self._pauses = [random.Random(1000 * load.seed + stream) for stream in streams]
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self._is_stepping, self._again_ns = False, 0
        for stream in streams:
            self._pause(stream)

    def _pause(self, stream: int) -> None:
        pause_ms = self._pauses[stream].expovariate(1 / self.load.pause_ms)
        self._later(round(1000 * pause_ms), partial(self._come, stream))

    def run(self, is_over: Callable[["Day"], bool]) -> None:
        """What happens at the same time happens in the order in which it came about."""
        while not is_over(self):
            self._feed()
            self._plan()
            self.cell.now_ns, _, happen = heappop(self._events)
            happen()

    def _at(self, at_ns: int, happen: Callable[[], None]) -> None:
        heappush(self._events, (at_ns, next(self._order), happen))

    def _later(self, us: int, happen: Callable[[], None]) -> None:
        self._at(self.cell.now_ns + 1000 * us, happen)

    def begin(self) -> None:
        """What was seen so far is not counted."""
        self.first_ms.clear()
        self.gap_ms.clear()
        self.shared_us.clear()
        self.room_us = self.used_us = 0

    def _timed(self, result: StepResult) -> StepResult:
        """With the noise, which the core is told too."""
        percent = self.load.noise_percent
        factor = 1 + self._noise.uniform(-percent, percent) / 100
        step_us = round(result.step_us * factor)
        if self.arrived and self.live_lines:
            self.shared_us.append(step_us)
        tokens = sum(count for one, count in self.worker.computed if one in self.arrived)
        if tokens and self.cell.scheduler.waiting.num_admissible:
            alone_us = round((self.load.base_us + tokens * self.load.token_us) * factor)
            room_us = max(0, self.gap_us - alone_us)
            self.room_us += room_us
            self.used_us += min(room_us, step_us - alone_us)
        return replace(result, step_us=step_us)

    # The worker

    def _take(self, plan: Plan) -> None:
        self.worker.inbox.append(plan)
        self._step()

    def _step(self) -> None:
        """The next, unless one is under way or there is nothing to do."""
        if self._is_stepping:
            return
        self.worker.computed.clear()
        if (result := self.worker.step()) is None:
            return
        self._is_stepping, result = True, self._timed(result)
        self._later(result.step_us, partial(self._end, result))

    def _end(self, result: StepResult) -> None:
        self._is_stepping = False
        self._later(self.load.way_us, partial(self._hear, result))
        self._step()

    # The scheduler

    def _plan(self) -> None:
        while self.cell.plan() is not None:
            pass
        if (again_ns := self.cell.again_ns) is not None and again_ns != self._again_ns:
            self._again_ns = again_ns
            self._at(again_ns, lambda: None)

    def _hear(self, result: StepResult) -> None:
        self._tell(self.cell.commit(result))

    def _prompt(self, tokens: int) -> tuple[int, ...]:
        """No two begin alike."""
        high, low = divmod(self.cell.next_sequence_id, 997)
        return (1 + low, 1 + high % 997, *range(2, tokens))[:tokens]

    def _feed(self) -> None:
        while self.lines_left and len(self.live_lines) < 2 * self.load.slots:
            prompt = self._prompt(self.load.line_prompt)
            line = self.cell.submit(prompt, self.load.line_tokens, priority=FLEX_PRIORITY)
            self.live_lines.add(line)
            self.lines_left -= 1

    def _come(self, stream: int) -> None:
        """In the middle of a step, as people do."""
        asked = self.cell.submit(self._prompt(self.load.prompt), self.load.tokens)
        self.arrived[asked] = self.cell.now_ns, stream

    def _tell(self, step: StepTokens) -> None:
        now_ns = self.cell.now_ns
        for sequence_id in {*step.sequence_ids} & {*self.arrived}:
            if (before := self.last.get(sequence_id)) is None:
                waited_ns = now_ns - self.arrived[sequence_id][0]
                self.first_ms.append(self.load.front_ms + waited_ns / 1e6)
            else:
                self.gap_ms.append((now_ns - before) / 1e6)
            self.last[sequence_id] = now_ns
        for sequence_id in list(self.cell.endings):
            del self.cell.endings[sequence_id], self.cell.outputs[sequence_id]
            self.live_lines.discard(sequence_id)
            if (who := self.arrived.pop(sequence_id, None)) is not None:
                del self.last[sequence_id]
                self._pause(who[1])

    def figures(self) -> dict[str, float]:
        first, gap = quantiles(self.first_ms, n=100), quantiles(self.gap_ms, n=100)
        return {
            "first_p50_ms": round(first[49], 2),
            "first_p99_ms": round(first[98], 2),
            "gap_p50_ms": round(gap[49], 2),
            "gap_p99_ms": round(gap[98], 2),
        }


def measured(load: Load, *, lines: int, seconds: float | None) -> dict[str, Any]:
    """Beside so many lines, or for so long beside a batch that does not end; and as long alone."""
    beside, alone = Day(load, lines), Day(load, 0)
    for day in (beside, alone):
        day.run(lambda day: day.cell.now_ns >= WARM_S * 1e9)
        day.begin()
    if seconds is None:
        beside.run(lambda day: not day.lines_left and not day.live_lines)
    else:
        beside.run(lambda day: day.cell.now_ns >= seconds * 1e9)
    alone.run(lambda day: day.cell.now_ns >= beside.cell.now_ns)
    told = {"alone": alone.figures(), "beside_a_batch": beside.figures()}
    together, apart = told["beside_a_batch"], told["alone"]
    return {
        "seconds": round(beside.cell.now_ns / 1e9, 1),
        "warm_s": WARM_S,
        "live_requests": len(beside.first_ms),
        "lines": lines - beside.lines_left - len(beside.live_lines),
        "live": told,
        "gap_p99_of_gap": round(together["gap_p99_ms"] / load.gap_ms, 3),
        "first_p99_of_alone": round(together["first_p99_ms"] / apart["first_p99_ms"], 3),
        "first_p99_later_in_gaps": round(
            (together["first_p99_ms"] - apart["first_p99_ms"]) / load.gap_ms, 3
        ),
        "room_used": round(beside.used_us / max(1, beside.room_us), 3),
        "step_of_gap": round(mean(beside.shared_us) / beside.gap_us, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--every-load", action="store_true")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    for load in LOADS if asked.every_load else (CHATS,):
        lines, seconds = asked.lines, None
        if asked.every_load:
            lines, seconds = 10_000_000, asked.seconds
        record("flex", asdict(load) | measured(load, lines=lines, seconds=seconds), save=asked.save)


if __name__ == "__main__":
    main()
