"""Where a request's time went: without holes, and with the cause that a test brought about."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import pytest

from scheduler_svc import timeline, timeline_intervals
from scheduler_svc.core.commands import Command, Expire, StoreBehind, WorkerLate
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.types import FLEX_PRIORITY, Reason
from scheduler_svc.timeline import Phase, Timelines
from scheduler_svc.timeline_intervals import GAPS_SHOWN, Interval, Timeline, timelines_of
from tests.sim.test_scheduler_sim import World
from tests.support.cell import Cell, spec

MS: Final = 1_000_000


class Told(Cell):
    """A cell whose every command is written down."""

    def __init__(self, *specs: Any, **knobs: Any) -> None:
        self.timelines = Timelines()
        super().__init__(*specs, **knobs)

    def see(self, command: Command, outcome: Outcome) -> None:
        super().see(command, outcome)
        self.timelines.take(command, outcome, self.now_ns, self.scheduler.waiting.throttled)

    def timeline(self, sequence_id: int, choice: int = 0) -> Timeline:
        return timelines_of(self.timelines.snapshot(f"r{sequence_id}"))[choice]

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
    assert len(longest) == GAPS_SHOWN
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


def tenant_behind() -> tuple[Told, int]:
    """No look names it: of a throttled tenant nobody is looked at."""
    cell, _ = tenant()
    return cell, cell.submit(3, 5, tenant="b")


def store() -> tuple[Told, int]:
    """While it decodes, and another waits."""
    cell = Told(spec(slots=1), lease=1)
    one = cell.submit(3, 30)
    cell.turns(3)
    behind(cell, MS)
    return cell, one


def store_and_queue() -> tuple[Told, int]:
    cell, _ = store()
    one = cell.submit(3, 2)
    behind(cell, MS)
    return cell, one


def behind(cell: Told, for_ns: int) -> None:
    cell.apply(StoreBehind(is_behind=True))
    cell.now_ns += for_ns
    assert cell.plan() is None
    cell.apply(StoreBehind(is_behind=False))


def late() -> tuple[Told, int]:
    """Its only worker does not answer."""
    cell = Told(spec(slots=2))
    cell.submit(3, 30)
    cell.turns(2)
    cell.apply(WorkerLate(worker_id="w1"))
    cell.now_ns += MS
    one = cell.submit(3, 2)
    cell.now_ns += MS
    return cell, one


def none_here() -> tuple[Told, int]:
    cell = Told()
    one = cell.submit(3, 2)
    cell.now_ns += MS
    cell.join("w1", spec())
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
    "a tenant that is throttled": (tenant_behind, Why.TENANT.value),
    "a store that is behind": (store_and_queue, Why.STORE_BEHIND.value),
    "a worker that is late": (late, Why.LATE.value),
    "no worker": (none_here, timeline.NO_WORKER),
    "preempted": (preempted, f"{timeline.PREEMPTED}: {timeline.NO_BLOCKS}"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_is_named(cause: str) -> None:
    stage, why = CAUSES[cause]
    cell, one = stage()
    cell.finish()
    assert why in cell.whys(one)
    check(cell.timeline(one), cell.requests[one].arrived_ns)


def stalls(cell: Told, sequence_id: int) -> list[Interval]:
    return [i for i in cell.timeline(sequence_id).intervals if i.phase is Phase.STALL]


def gapped(
    cell: Told, gap_ns: int, *, at_once: bool = False, step_us: int = 0, is_late: bool = False
) -> int:
    """One that decodes, and then a step of its worker that takes so long to come."""
    one = cell.submit(2, 40)
    cell.turns(9)
    if at_once:
        cell.submit(200, 2)
    cell.plan()
    result = replace(cell.compute(), step_us=step_us)
    if is_late:
        cell.apply(WorkerLate(worker_id="w1"))
    cell.now_ns += gap_ns
    cell.commit(result)
    cell.finish()
    check(cell.timeline(one), 0)
    return one


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"at_once": True}, timeline_intervals.ANOTHER_PROMPT),
        ({"at_once": True, "step_us": 20_000}, timeline_intervals.ANOTHER_PROMPT),
        ({"at_once": True, "step_us": 2_000}, timeline_intervals.NO_STEP),
        ({"step_us": 25_000}, timeline_intervals.LONG_STEP),
        ({"step_us": 1}, timeline_intervals.NO_STEP),
        ({"is_late": True}, Why.LATE.value),
    ],
)
def test_a_stall_of_who_decodes_stands_apart_with_its_cause(told: Any, why: str) -> None:
    cell = Told(spec(step_tokens=300, slots=4), lease=1, in_flight=1)
    one = gapped(cell, 25 * MS, **told)
    (stall,) = stalls(cell, one)
    assert (stall.why, stall.num_steps) == (why, 1)
    assert 25 * MS <= stall.end_ns - stall.start_ns <= 26 * MS
    is_anothers = why == timeline_intervals.ANOTHER_PROMPT
    assert stall.stalled_by == (one + 1 if is_anothers else None)
    steps = [i.num_steps for i in cell.timeline(one).intervals if i.phase is not Phase.PREFILL]
    assert sum(steps) == 39


def test_a_gap_that_is_as_usual_is_no_stall() -> None:
    """Every step takes as long."""
    cell = Told(spec(), lease=1, in_flight=1)
    one = cell.submit(2, 40)
    while cell.scheduler.live_count:
        cell.turn()
        cell.now_ns += 25 * MS
    assert not stalls(cell, one)
    decode = cell.timeline(one).intervals[-1]
    assert 25 * MS <= decode.gap_p50_ns <= 26 * MS


def test_who_sits_out_for_prompts_is_told_so() -> None:
    cell = Told(spec(step_tokens=40, slots=4), lease=1, in_flight=1, mix="prefill_first")
    one = cell.submit(2, 40)
    cell.turns(9)
    other = cell.submit(200, 2)
    for _ in range(6):
        cell.turn()
        cell.now_ns += 25 * MS
    cell.finish()
    check(cell.timeline(one), 0)
    first = stalls(cell, one)[0]
    assert (first.why, first.stalled_by) == (timeline_intervals.SAT_OUT, other)


def test_a_store_that_is_behind_stalls_who_has_begun() -> None:
    cell, one = store()
    cell.finish()
    check(cell.timeline(one), 0)
    assert [(stall.why, stall.end_ns - stall.start_ns) for stall in stalls(cell, one)] == [
        (Why.STORE_BEHIND.value, MS)
    ]


def test_an_end_waits_for_its_commit() -> None:
    """And a commit that took long stalls whoever is in the middle of something."""
    cell = Told(spec(slots=2), lease=1)
    one, two = cell.submit(3, 4), cell.submit(3, 40)
    cell.turns(8)
    ended_ns = cell.timeline(one).intervals[-1].end_ns
    assert cell.timeline(one).ended
    cell.now_ns += 80 * MS
    cell.timelines.committed(ended_ns - 1, ended_ns - 1, ended_ns)
    assert cell.timeline(one).intervals[-1].phase is Phase.DECODE
    cell.timelines.committed(ended_ns, cell.now_ns, cell.now_ns)
    last = cell.timeline(one).intervals[-1]
    assert (last.phase, last.start_ns, last.end_ns) == (Phase.COMMIT, ended_ns, cell.now_ns)
    cell.finish()
    check(cell.timeline(one), 0)
    check(cell.timeline(two), 0)
    assert [stall.why for stall in stalls(cell, two)] == [Why.STORE_BEHIND.value]


@pytest.mark.parametrize("is_leader", [False, True])
def test_the_silence_before_a_loss_is_part_of_it(is_leader: bool) -> None:
    cell = Told(spec(slots=2), lease=1, in_flight=1)
    one = cell.submit(3, 30)
    cell.turns(8)
    cell.now_ns += 90 * MS
    if is_leader:
        cell.lead_anew()
    else:
        cell.kill("w1")
        cell.join("w2", spec())
    cell.finish()
    check(cell.timeline(one), 0)
    (stall,) = stalls(cell, one)
    assert stall.why == (timeline.LEADER_LOST if is_leader else timeline.WORKER_LOST)
    assert stall.end_ns - stall.start_ns >= 90 * MS


def test_who_waits_for_an_answer_now_is_told_so() -> None:
    cell = Told(spec(slots=2), lease=1, in_flight=1)
    one = cell.submit(3, 30)
    cell.turns(8)
    cell.now_ns += 90 * MS
    cell.apply(Expire())
    check(cell.timeline(one), 0)
    last = cell.timeline(one).intervals[-1]
    assert (last.phase, last.why) == (Phase.STALL, timeline_intervals.NO_ANSWER)


def test_blocks_and_who_had_a_slot_beside_it() -> None:
    cell = Told(spec(slots=3), lease=1)
    prompt = tuple(range(1, 41))
    first = cell.submit(prompt, 20)
    cell.turns(3)
    second = cell.submit((*prompt[:12], 7, 7), 3)
    cell.finish()
    alone = cell.submit(3, 2)
    cell.finish()
    told = cell.timeline(second)
    prefill = next(i for i in told.intervals if i.phase is Phase.PREFILL)
    assert (prefill.num_blocks, prefill.num_shared_blocks) == (4, 3)
    assert (told.num_mates, told.mates) == (1, (f"r{first}",))
    assert cell.timeline(alone).num_mates == 0


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
    told = timelines_of(cell.timelines.snapshot(f"r{one}"))
    assert [(each.choice, each.ended) for each in told] == [(n, "length") for n in range(3)]
    for each in told:
        check(each, 0)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "OVER_MAX", 2)
    cell = Told(spec())
    ids = [cell.submit(3, 2) for _ in range(4)]
    cell.finish()
    known = [bool(timelines_of(cell.timelines.snapshot(f"r{id}"))) for id in ids]
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
        for each in timelines_of(world.timelines.snapshot(request.id)):  # type: ignore[attr-defined]
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
    before = timelines_of(snapshot)
    cell.finish()
    assert timelines_of(snapshot) == before
    assert timelines_of(cell.timelines.snapshot(f"r{one}")) != before
