"""What the lines of a batch take from live requests, by the decisions of the scheduler alone.

    python -m benchmarks.core.bench_flex [--lines 50000] [--gap-ms 5] [--save]

The real core before one worker whose steps take 2 ms and 0.1 ms for each token, in a time of its
own: the same figures on every machine, whatever else runs there. What gateway, store and clients
add is measured by `benchmarks.serving.batches`. Live streams come and go, alone and beside a batch
that always has two lines for each slot: the time to their first token, the gaps between tokens, and
how much of the gap that lines may take the steps took.
"""

import argparse
import random
from collections.abc import Callable
from statistics import mean, quantiles
from typing import Any, Final

from benchmarks.recording import record
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Event, Finished, Outcome, RequestOver, StepTokens
from scheduler_svc.core.types import FLEX_PRIORITY
from tests.support.cell import Cell, spec

BASE_US, TOKEN_US = 2000, 100
SLOTS: Final = 128
WINDOW: Final = 2 * SLOTS
LINE_PROMPT, LINE_TOKENS = 6, 24
LIVE, LIVE_PROMPT, LIVE_TOKENS = 4, 1000, 96
# Between the end of a live request and the next of the same stream, in the mean.
PAUSE_MS: Final = 300.0
SECONDS_ALONE: Final = 40


class Fast(Cell):
    """Nothing is checked but that everybody ends."""

    def apply(self, command: Command) -> Outcome:
        outcome = self.scheduler.apply(command, self.now_ns)
        self.hear(outcome.events)
        self.see(command, outcome)
        return outcome

    def hear(self, events: tuple[Event, ...]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.endings[event.sequence_id] = event
            elif isinstance(event, RequestOver):
                del self.requests[event.sequence_id]


class Day:
    """Live streams, and lines beside them."""

    def __init__(self, lines: int, gap_ms: float) -> None:
        worker = spec(slots=SLOTS, step_tokens=SLOTS + 300, blocks=16_000)
        self.cell = Fast(
            worker, batch_gap_us=round(1000 * gap_ms), itl_target_us=round(1000 * gap_ms)
        )
        self.cell.workers["w1"].base_us, self.cell.workers["w1"].token_us = BASE_US, TOKEN_US
        self.lines_left, self.live_lines = lines, set[int]()
        self.arrived: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.first_ms: list[float] = []
        self.gap_ms: list[float] = []
        self.shared_us: list[int] = []
        self._random = random.Random(7)
        self._due = sorted(self._pause() for _ in range(LIVE))

    def _pause(self) -> int:
        return self.cell.now_ns + round(1e6 * self._random.expovariate(1 / PAUSE_MS))

    def run(self, is_over: Callable[["Day"], bool]) -> None:
        while not is_over(self):
            self._feed()
            self._plan()
            result = self.cell.workers["w1"].step()
            if result is None:
                self.cell.now_ns = self._due[0]
                self._come(self._due[0])
                continue
            if self.arrived and self.live_lines:
                self.shared_us.append(result.step_us)
            end_ns = self.cell.now_ns + 1000 * result.step_us
            self._come(end_ns)
            self.cell.now_ns = end_ns
            self._tell(self.cell.commit(result))

    def _plan(self) -> None:
        while self.cell.plan() is not None:
            pass

    def _feed(self) -> None:
        while self.lines_left and len(self.live_lines) < WINDOW:
            line = self.cell.submit(LINE_PROMPT, LINE_TOKENS, priority=FLEX_PRIORITY)
            self.live_lines.add(line)
            self.lines_left -= 1

    def _come(self, until_ns: int) -> None:
        """In the middle of a step, as people do."""
        while self._due and self._due[0] <= until_ns:
            self.cell.now_ns = self._due.pop(0)
            self.arrived[self.cell.submit(LIVE_PROMPT, LIVE_TOKENS)] = self.cell.now_ns
            self._plan()

    def _tell(self, step: StepTokens) -> None:
        now_ns = self.cell.now_ns
        for sequence_id in {*step.sequence_ids} & {*self.arrived}:
            if (before := self.last.get(sequence_id)) is None:
                self.first_ms.append((now_ns - self.arrived[sequence_id]) / 1e6)
            else:
                self.gap_ms.append((now_ns - before) / 1e6)
            self.last[sequence_id] = now_ns
        for sequence_id in list(self.cell.endings):
            del self.cell.endings[sequence_id], self.cell.outputs[sequence_id]
            self.live_lines.discard(sequence_id)
            if self.arrived.pop(sequence_id, None) is not None:
                del self.last[sequence_id]
                self._due = sorted([*self._due, self._pause()])

    def figures(self) -> dict[str, float]:
        return {
            "first_p50_ms": round(quantiles(self.first_ms, n=100)[49], 2),
            "first_p99_ms": round(quantiles(self.first_ms, n=100)[98], 2),
            "gap_p50_ms": round(quantiles(self.gap_ms, n=100)[49], 2),
            "gap_p99_ms": round(quantiles(self.gap_ms, n=100)[98], 2),
        }


def measured(lines: int, gap_ms: float) -> dict[str, Any]:
    alone, beside = Day(0, gap_ms), Day(lines, gap_ms)
    alone.run(lambda day: day.cell.now_ns >= SECONDS_ALONE * 1e9)
    beside.run(lambda day: not day.lines_left and not day.live_lines)
    told = {"alone": alone.figures(), "beside_a_batch": beside.figures()}
    return {
        "seconds": round(beside.cell.now_ns / 1e9, 1),
        "live_requests": len(beside.first_ms),
        "live": told,
        "gap_p99_of_gap": round(told["beside_a_batch"]["gap_p99_ms"] / gap_ms, 3),
        "first_p99_of_alone": round(
            told["beside_a_batch"]["first_p99_ms"] / told["alone"]["first_p99_ms"], 3
        ),
        "room_used": round(mean(beside.shared_us) / (1000 * gap_ms), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--lines", type=int, default=50_000)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    sizes = {"lines": asked.lines, "batch_gap_ms": asked.gap_ms, "slots": SLOTS}
    record("flex", sizes | measured(asked.lines, asked.gap_ms), save=asked.save)


if __name__ == "__main__":
    main()
