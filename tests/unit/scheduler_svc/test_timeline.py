"""Where a request's time went: without holes, and with the cause that a test brought about."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, Final

import pytest

from scheduler_svc import timeline
from scheduler_svc.core.commands import Command
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.types import FLEX_PRIORITY, Reason
from scheduler_svc.timeline import Life, Phase, Timelines
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

    def life(self, sequence_id: int, choice: int = 0) -> Life:
        return self.timelines.lives(f"r{sequence_id}")[choice]

    def whys(self, sequence_id: int) -> list[str]:
        """For what it waited, one after the other."""
        waits = [i for i in self.life(sequence_id).intervals if i.phase is Phase.QUEUE]
        return list(dict.fromkeys(interval.why for interval in waits))


def check(life: Life, arrived_ns: int) -> None:
    """No holes, nothing twice, nothing empty."""
    assert all(interval.end_ns > interval.start_ns for interval in life.intervals)
    assert all(one.end_ns == other.start_ns for one, other in pairwise(life.intervals))
    assert not life.intervals or life.intervals[0].start_ns == arrived_ns


def test_a_life_from_the_queue_to_its_end() -> None:
    """A prompt in chunks beside another that decodes, with a cached block at its front."""
    cell = Told(spec(step_tokens=24, mixed_tokens=24, slots=8), lease=1, in_flight=1)
    prompt = tuple(range(1, 41))
    first = cell.submit(prompt, 60)
    cell.turns(6)
    second = cell.submit(prompt[:8] + tuple(range(100, 140)), 6)
    cell.finish()
    life = cell.life(second)
    check(life, cell.requests[second].arrived_ns)
    assert life.ended == Reason.LENGTH.value
    prefill, decode = life.intervals[-2:]
    assert (prefill.phase, prefill.num_cached_tokens) == (Phase.PREFILL, 8)
    assert sum(prefill.chunks) == 40
    assert len(prefill.chunks) >= 2
    assert (decode.phase, decode.num_steps, decode.worker_id) == (Phase.DECODE, 5, "w1")
    assert decode.batch_mates == 1
    longest = cell.life(first).intervals[-1].longest
    assert len(longest) == timeline.GAPS_SHOWN
    check(cell.life(first), 0)


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
    "flex": (flex, f"{timeline.GAVE_WAY}: {Why.PLACE_NEEDED.value}"),
    "a worker lost": (worker, timeline.WORKER_LOST),
    "preempted": (preempted, timeline.FOR_OTHERS),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named(cause: str) -> None:
    stage, why = CAUSES[cause]
    cell, one = stage()
    cell.finish()
    assert why in cell.whys(one)
    check(cell.life(one), cell.requests[one].arrived_ns)


def test_who_stood_before_it_is_named() -> None:
    cell = Told(spec(blocks=12))
    cell.submit(30, 10)
    cell.turns(2)
    large, small = cell.submit(20, 2), cell.submit(2, 2)
    cell.finish()
    behind = {interval.behind for interval in cell.life(small).intervals}
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
    worst = cell.life(one).intervals[-1].longest[0]
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
    life = cell.life(one)
    check(life, cell.requests[one].arrived_ns)
    first = life.intervals[0]
    assert (first.phase, first.why) == (Phase.UNKNOWN, timeline.BEFORE)
    assert first.end_ns - first.start_ns >= 100


def test_a_replay_of_both_leaderships_knows_it() -> None:
    cell = Told(spec(slots=2))
    one = cell.submit(3, 30)
    cell.turns(5)
    cell.now_ns += 100
    cell.lead_anew()
    cell.finish()
    check(cell.life(one), cell.requests[one].arrived_ns)
    assert timeline.LEADER_LOST in cell.whys(one)
    assert Phase.UNKNOWN not in {interval.phase for interval in cell.life(one).intervals}


def test_every_choice_has_its_own() -> None:
    cell = Told(spec())
    one = cell.submit(9, 12, n=3)
    cell.finish()
    lives = cell.timelines.lives(f"r{one}")
    assert [(life.choice, life.ended) for life in lives] == [(n, "length") for n in range(3)]
    for life in lives:
        check(life, 0)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "OVER_MAX", 2)
    cell = Told(spec())
    ids = [cell.submit(3, 2) for _ in range(4)]
    cell.finish()
    known = [bool(cell.timelines.lives(f"r{id}")) for id in ids]
    assert known == [False, False, True, True]


class ToldWorld(World):
    def apply(self, command: Command) -> Outcome:
        self.__dict__.setdefault("timelines", Timelines())
        outcome = super().apply(command)
        self.timelines.take(command, outcome, self.now_ns)  # type: ignore[attr-defined]
        return outcome


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_missing_whatever_happens(seed: int) -> None:
    """Random requests, faults and rules: what is told covers every life, and no more."""
    world = ToldWorld(seed)
    world.run(turns=60, requests=25)
    told = 0
    for request in world.requests:
        for life in world.timelines.lives(request.id):  # type: ignore[attr-defined]
            check(life, request.arrived_ns)
            told += len(life.intervals)
            assert life.ended or life.sequence_id not in world.endings
    assert told or not world.requests
