"""The room that lines have used, by what a core was told, is that of whoever made the steps."""

from dataclasses import replace

import pytest

from benchmarks.core.bench_flex import CHATS, Day, Fast
from benchmarks.serving.batch_room import Steps
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Outcome

# Prompts are hardly ever computed: the steps that are for them have room too, and are not counted.
LOAD = replace(CHATS, prompt=20, tokens=400, pause_ms=100.0)
SECONDS = 3


def day(monkeypatch: pytest.MonkeyPatch, steps: Steps, lines: int) -> Day:
    def see(cell: Fast, command: Command, outcome: Outcome) -> None:
        steps.told(command, outcome, cell.now_ns, cell.scheduler)

    monkeypatch.setattr(Fast, "see", see)
    lived = Day(LOAD, lines)
    lived.run(lambda day: day.cell.now_ns >= SECONDS * 1e9)
    return lived


def test_room_used(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, beside = Steps(), Steps()
    day(monkeypatch, alone, 0)
    told = day(monkeypatch, beside, 100_000)
    assert not alone.beside
    beside.alone = alone.alone
    figures = beside.figures(told.gap_us)
    assert figures["alone_ms"] == {live: 2 + 0.1 * live for live in (1, 2, 3, 4)}
    assert figures["room_used"] == pytest.approx(told.used_us / told.room_us, abs=0.02)
    assert figures["room_used"] > 0.9
    assert (alone.slots_taken, figures["slots_taken"]) == (0, 0)


def test_where_slots_are_taken_the_gap_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of eight: lines wait for its slots."""
    steps = Steps()
    monkeypatch.setattr("tests.unit.bench.test_bench_batch_room.LOAD", replace(LOAD, slots=8))
    day(monkeypatch, steps, 1000)
    assert steps.slots_taken > 3 * len(steps.beside)


def test_who_takes_the_gap_alone_leaves_none() -> None:
    steps = Steps()
    steps.alone[1], steps.beside = [3000], [(1, 3500), (1, 3000)]
    assert steps.figures(2000)["room_used"] is None
    assert steps.figures(4000)["room_used"] == 0.25
