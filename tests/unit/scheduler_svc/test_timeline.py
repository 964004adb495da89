"""Where a request's time went: without holes, and with the cause that a test brought about."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

import pytest

from scheduler_svc import timeline
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.types import FLEX_PRIORITY, Reason
from scheduler_svc.timeline import Phase, Timeline, Timelines
from tests.sim.test_scheduler_sim import World
from tests.support.cell import Cell, spec


class Told(Cell):
    """A cell whose every command is written down."""

    def __init__(self, *specs: Any, **knobs: Any) -> None:
        self.timelines = Timelines()
        super().__init__(*specs, **knobs)

    def see(self, command: Command, outcome: Outcome) -> None:
        super().see(command, outcome)
        self.timelines.take(command, outcome, self.now_ns)

    def timeline(self, sequence_id: int, choice: int = 0) -> Timeline:
        return self.timelines.snapshot(f"r{sequence_id}").timelines()[choice]

    def whys(self, sequence_id: int) -> list[str]:
        """For what it waited, one after the other."""
        waits = [i for i in self.timeline(sequence_id).intervals if i.phase is Phase.QUEUE]
        return list(dict.fromkeys(interval.why for interval in waits))


def check(told: Timeline, arrived_ns: int) -> None:
    """No holes, nothing twice, nothing empty."""
    assert all(interval.end_ns > interval.start_ns for interval in told.intervals)
    assert all(one.end_ns == other.start_ns for one, other in pairwise(told.intervals))
    assert not told.intervals or told.intervals[0].start_ns == arrived_ns


def test_a_choice_from_the_queue_to_its_end() -> None:
    """A prompt in chunks beside another that decodes, with a cached block at its front."""
    cell = Told(spec(step_tokens=24, mixed_tokens=24, slots=8), lease=1, in_flight=1)
    prompt = tuple(range(1, 41))
    first = cell.submit(prompt, 60)
    cell.turns(6)
    second = cell.submit(prompt[:8] + tuple(range(100, 140)), 6)
    cell.finish()
    told = cell.timeline(second)
    check(told, cell.requests[second].arrived_ns)
    assert told.ended == Reason.LENGTH.value
    prefill, decode = told.intervals[-2:]
    assert (prefill.phase, prefill.num_cached_tokens) == (Phase.PREFILL, 8)
    assert sum(prefill.chunks) == 40
    assert len(prefill.chunks) >= 2
    assert (decode.phase, decode.num_steps, decode.worker_id) == (Phase.DECODE, 5, "w1")
    assert decode.batch_mates == 1
    longest = cell.timeline(first).intervals[-1].longest
    assert len(longest) == timeline.GAPS_SHOWN
    check(cell.timeline(first), 0)


def slots() -> tuple[Told, int]:
    cell = Told(spec(slots=1))
    cell.submit(3, 20)
    cell.turns(2)
    return cell, cell.submit(3, 2)


def blocks() -> tuple[Told, int]:
    cell = Told(spec(blocks=12))
    cell.submit(30, 10)
    cell.turns(2)
    return cell, cell.submit(20, 2)


def budget() -> tuple[Told, int]:
    cell = Told(spec(slots=8, step_tokens=40, mixed_tokens=24), lease=1, prefill_tokens=8)
    cell.submit(2, 90)
    cell.turns(2)
    for _ in range(3):
        cell.submit(300, 2)
    cell.turn()
    return cell, cell.submit(30, 2)


def tenant() -> tuple[Told, int]:
    cell = Told(spec(), tenant_tokens=10)
    cell.submit(3, 5, tenant="a")
    cell.submit(3, 5, tenant="b")
    cell.turns(1)
    return cell, cell.submit(3, 5, tenant="b")


def long_prefill() -> tuple[Told, int]:
    knobs = {"long_prefill_tokens": 20, "long_prefills_max": 1}
    cell = Told(spec(step_tokens=64), lease=1, **knobs)
    cell.submit(200, 2)
    cell.turn()
    return cell, cell.submit(50, 2)


def policy() -> tuple[Told, int]:
    cell = Told(spec(), cadence="interval", schedule_interval_steps=9, lease=1)
    cell.submit(3, 30)
    cell.turns(2)
    return cell, cell.submit(3, 2)


def static() -> tuple[Told, int]:
    cell = Told(spec(), policy="static")
    cell.submit(3, 30)
    cell.turns(2)
    return cell, cell.submit(3, 2)


def flex() -> tuple[Told, int]:
    cell = Told(spec(slots=1))
    one = cell.submit(3, 30, priority=FLEX_PRIORITY)
    cell.turns(2)
    cell.submit(3, 9)
    return cell, one


def worker() -> tuple[Told, int]:
    cell = Told(spec(slots=2), spec(slots=2))
    one = cell.submit(3, 30)
    cell.turns(3)
    cell.kill(next(w for w in cell.workers if one in cell.running(w)))
    return cell, one


def preempted() -> tuple[Told, int]:
    cell = Told(spec(blocks=8, slots=2), lease=1)
    cell.submit(8, 20)
    one = cell.submit(8, 20)
    return cell, one


# What is brought about, and what the request that suffers from it says.
CAUSES: Final[Mapping[str, tuple[Callable[[], tuple[Told, int]], str]]] = {
    "slots": (slots, Why.NO_SLOT.value),
    "blocks": (blocks, Why.BLOCKS.value),
    "budget": (budget, Why.NO_BUDGET.value),
    "tenant": (tenant, Why.TENANT.value),
    "another's long prefill": (long_prefill, Why.LONG_PREFILL.value),
    "cadence": (policy, Why.CADENCE.value),
    "a batch that runs out": (static, Why.BATCH.value),
    "flex": (flex, f"{timeline.PREEMPTED}: {Why.PLACE_NEEDED.value}"),
    "a worker lost": (worker, timeline.WORKER_LOST),
    "preempted": (preempted, f"{timeline.PREEMPTED}: {timeline.NO_BLOCKS}"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named(cause: str) -> None:
    stage, why = CAUSES[cause]
    cell, one = stage()
    cell.finish()
    assert why in cell.whys(one)
    check(cell.timeline(one), cell.requests[one].arrived_ns)


def test_who_stood_before_it_is_named() -> None:
    cell = Told(spec(blocks=12))
    cell.submit(30, 10)
    cell.turns(2)
    large, small = cell.submit(20, 2), cell.submit(2, 2)
    cell.finish()
    behind = {interval.behind for interval in cell.timeline(small).intervals}
    assert large in behind
    assert cell.whys(small)[-1] == Why.BLOCKS.value


def test_a_long_gap_says_whose_prompt_was_in_the_step() -> None:
    cell = Told(spec(step_tokens=300, slots=4), lease=1, in_flight=1)
    one = cell.submit(2, 40)
    cell.turns(5)
    cell.submit(200, 2)
    cell.plan()
    cell.now_ns += 500
    cell.step()
    cell.finish()
    worst = cell.timeline(one).intervals[-1].longest[0]
    assert (worst.prompt_tokens, worst.rows) == (200, 2)
    assert worst.gap_ns >= 500


def test_a_new_leader_says_what_it_cannot_know() -> None:
    cell = Told(spec(slots=2))
    cell.now_ns = 50
    cell.turn()
    one = cell.submit(3, 30)
    cell.turns(5)
    cell.now_ns += 100
    cell.timelines = Timelines()
    cell.lead_anew()
    cell.finish()
    told = cell.timeline(one)
    check(told, cell.requests[one].arrived_ns)
    first = told.intervals[0]
    assert (first.phase, first.why) == (Phase.UNKNOWN, timeline.BEFORE)
    assert first.end_ns - first.start_ns >= 100


def test_a_replay_of_both_leaderships_knows_it() -> None:
    cell = Told(spec(slots=2))
    one = cell.submit(3, 30)
    cell.turns(5)
    cell.now_ns += 100
    cell.lead_anew()
    cell.finish()
    check(cell.timeline(one), cell.requests[one].arrived_ns)
    assert timeline.LEADER_LOST in cell.whys(one)
    assert Phase.UNKNOWN not in {interval.phase for interval in cell.timeline(one).intervals}


def test_every_choice_has_its_own() -> None:
    cell = Told(spec())
    one = cell.submit(9, 12, n=3)
    cell.finish()
    told = cell.timelines.snapshot(f"r{one}").timelines()
    assert [(each.choice, each.ended) for each in told] == [(n, "length") for n in range(3)]
    for each in told:
        check(each, 0)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "OVER_MAX", 2)
    cell = Told(spec())
    ids = [cell.submit(3, 2) for _ in range(4)]
    cell.finish()
    known = [bool(cell.timelines.snapshot(f"r{id}").timelines()) for id in ids]
    assert known == [False, False, True, True]


class ToldWorld(World):
    def apply(self, command: Command) -> Outcome:
        self.__dict__.setdefault("timelines", Timelines())
        outcome = super().apply(command)
        self.timelines.take(command, outcome, self.now_ns)  # type: ignore[attr-defined]
        return outcome


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_missing_whatever_happens(seed: int) -> None:
    """Random requests, faults and rules: what is told covers every choice's time, and no more."""
    world = ToldWorld(seed)
    world.run(turns=60, requests=25)
    told = 0
    for request in world.requests:
        for each in world.timelines.snapshot(request.id).timelines():  # type: ignore[attr-defined]
            check(each, request.arrived_ns)
            told += len(each.intervals)
            assert each.ended or each.sequence_id not in world.endings
    assert told or not world.requests


def test_of_many_preemptions_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a batch may give way all day: what is kept of it has a bound."""
    monkeypatch.setattr(timeline, "TRANSITIONS_MAX", 12)
    # Nothing of it is cached, so that its prompt takes several steps each time.
    cell = Told(spec(slots=1, block_size=512, step_tokens=25), lease=1)
    one = cell.submit(60, 200, priority=FLEX_PRIORITY)
    for _ in range(9):
        cell.turns(4)
        cell.submit(3, 2)
        cell.turns(4)
    told = cell.timeline(one)
    check(told, cell.requests[one].arrived_ns)
    first, *rest = told.intervals
    assert (first.phase, first.why) == (Phase.UNKNOWN, timeline.TOO_LONG_AGO)
    assert {each.phase for each in rest} == {Phase.QUEUE, Phase.PREFILL, Phase.DECODE}
    assert all(each.chunks for each in rest if each.phase is Phase.PREFILL)
    (track,) = cell.timelines.snapshot(f"r{one}").tracks
    assert len(track.transitions) == 12
    cell.finish()


def test_a_snapshot_shares_nothing_that_changes() -> None:
    cell = Told(spec(slots=2, step_tokens=20), lease=1)
    one = cell.submit(60, 20)
    cell.turns(2)
    snapshot = cell.timelines.snapshot(f"r{one}")
    before = snapshot.timelines()
    cell.finish()
    assert snapshot.timelines() == before
    assert cell.timelines.snapshot(f"r{one}").timelines() != before
