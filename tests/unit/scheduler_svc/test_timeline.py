"""Where a request's time went: without holes, and nothing twice."""

from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from kaiten.cli.live.explain import lines_of
from scheduler_svc import timeline, timeline_intervals, timeline_track
from scheduler_svc.core.commands import Command, Expire, StoreBehind, WorkerLate
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.types import FLEX_PRIORITY, Reason
from scheduler_svc.timeline import Timelines
from scheduler_svc.timeline_intervals import GAPS_SHOWN, mentioned, timelines_of
from scheduler_svc.timeline_track import JoinBlocks, Phase
from scheduler_svc.timeline_wire import timeline_to_proto
from tests.sim.test_scheduler_sim import World
from tests.support.cell import spec
from tests.support.told_cell import MS, Told, check


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
    (stall,) = cell.stalls(one)
    assert (stall.why, stall.num_steps) == (why, 1)
    assert 25 * MS <= stall.end_ns - stall.start_ns <= 26 * MS
    is_anothers = why == timeline_intervals.ANOTHER_PROMPT
    assert stall.stalled_by == (one + 1 if is_anothers else None)
    steps = [i.num_steps for i in cell.timeline(one).intervals if i.phase is not Phase.PREFILL]
    assert sum(steps) == 39


def test_of_who_is_stalled_in_its_prompt_no_step_is_counted() -> None:
    """They are others'."""
    cell = Told(spec(step_tokens=8, slots=4), lease=4, in_flight=2)
    cell.submit(2, 60)
    cell.turns(9)
    one = cell.submit(60, 3)
    cell.turns(2)
    cell.plan()
    cell.plan()
    cell.apply(StoreBehind(is_behind=True))
    cell.now_ns += MS
    for _ in range(2):
        cell.commit(cell.compute())
    cell.apply(StoreBehind(is_behind=False))
    cell.finish()
    (stall,) = cell.stalls(one)
    assert (stall.why, stall.num_steps) == (Why.STORE_BEHIND.value, 0)
    assert sum(each.num_steps for each in cell.timeline(one).intervals) == 2


def test_a_gap_that_is_as_usual_is_no_stall() -> None:
    """Every step takes as long."""
    cell = Told(spec(), lease=1, in_flight=1)
    one = cell.submit(2, 40)
    while cell.scheduler.live_count:
        cell.turn()
        cell.now_ns += 25 * MS
    assert not cell.stalls(one)
    decode = cell.timeline(one).intervals[-1]
    assert 25 * MS <= decode.gap_p50_ns <= 26 * MS


def test_a_row_is_one_however_many_tokens_a_step_gives_it() -> None:
    """Beside nobody it has nobody beside it."""
    cell = Told(spec(slot_tokens=4), lease=1, in_flight=1)
    one = cell.submit(2, 40)
    cell.finish()
    decode = cell.timeline(one).intervals[-1]
    assert decode.num_steps < 39
    assert decode.batch_mates == 0
    assert {gap.rows for gap in decode.longest} == {1}


def test_however_many_workers_are_late_each_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that were, the oldest are forgotten; of those that are, none."""
    monkeypatch.setattr(timeline, "WORKERS_MAX", 2)
    cell = Told(*[spec(slots=1)] * 4)
    ids = [cell.submit(3, 5) for _ in cell.workers]
    for worker_id in cell.workers:
        cell.must_plan(worker_id)
        cell.apply(WorkerLate(worker_id=worker_id))
    cell.now_ns += 5 * MS
    for worker_id in cell.workers:
        cell.step(worker_id)
    assert all(cell.timelines.snapshot(f"r{one}").late for one in ids)
    cell.kill("w1")
    cell.join("w5", spec(slots=1))
    cell.must_plan("w5")
    cell.apply(WorkerLate(worker_id="w5"))
    late = [worker for one in ids for worker in cell.timelines.snapshot(f"r{one}").late]
    assert late == ["w5", "w4"]
    cell.finish()


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
    first = cell.stalls(one)[0]
    assert (first.why, first.stalled_by) == (timeline_intervals.SAT_OUT, other)


def test_who_sat_out_on_one_worker_does_not_on_the_next() -> None:
    """Whose plans have the same numbers."""
    cell = Told(spec(step_tokens=40, slots=4), lease=1, in_flight=1, mix="prefill_first")
    one = cell.submit(2, 60)
    cell.turns(9)
    other = cell.submit(200, 2)
    cell.turns(5)
    cell.cancel(other)
    cell.kill("w1")
    cell.join("w2", spec(slots=4))
    while one not in cell.endings:
        cell.turn()
        cell.now_ns += 25 * MS
    check(cell.timeline(one), 0)
    decoded = cell.timeline(one).intervals[-1]
    assert (decoded.phase, decoded.worker_id) == (Phase.DECODE, "w2")
    assert decoded.num_steps > 40
    assert not cell.stalls(one)


def test_an_end_waits_for_its_commit() -> None:
    """And a commit that took long stalls whoever is in the middle of something."""
    cell = Told(spec(slots=2), lease=1)
    one, two = cell.submit(3, 4), cell.submit(3, 40)
    cell.turns(8)
    ended_ns = cell.timeline(one).intervals[-1].end_ns
    assert cell.timeline(one).ended
    cell.now_ns += 280 * MS
    cell.timelines.committed(ended_ns - 1, ended_ns - 1, ended_ns)
    assert cell.timeline(one).intervals[-1].phase is Phase.DECODE
    cell.timelines.committed(ended_ns, cell.now_ns, cell.now_ns)
    last = cell.timeline(one).intervals[-1]
    assert (last.phase, last.start_ns, last.end_ns) == (Phase.COMMIT, ended_ns, cell.now_ns)
    cell.finish()
    check(cell.timeline(one), 0)
    check(cell.timeline(two), 0)
    assert [stall.why for stall in cell.stalls(two)] == [Why.STORE_BEHIND.value]


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
    (stall,) = cell.stalls(one)
    assert stall.why == (timeline_track.LEADER_LOST if is_leader else timeline_track.WORKER_LOST)
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
    assert prefill.blocks == JoinBlocks(given=4, shared=3)
    assert (told.num_mates, told.mates) == (1, (f"r{first}",))
    shown = [*lines_of("x", timeline_to_proto(told))]
    assert shown[-1].endswith(f"in a batch with 1 other request: r{first}")
    assert cell.timeline(alone).num_mates == 0


def test_blocks_that_came_back_from_host_memory() -> None:
    cell = Told(spec(blocks=9, host_blocks=50, step_tokens=10), lease=1)
    prompt = tuple(range(1, 18))
    # The second takes all but one of the pool's blocks.
    for tokens in (prompt, tuple(range(100, 129))):
        cell.submit(tokens, 2)
        cell.finish()
    again = cell.submit(prompt + tuple(range(200, 215)), 2)
    cell.finish()
    told = cell.timeline(again)
    prefill = next(i for i in told.intervals if i.phase is Phase.PREFILL)
    assert prefill.num_cached_tokens == 16
    assert prefill.blocks == JoinBlocks(given=8, shared=4, swapped_in=3)
    shown = " ".join(lines_of("x", timeline_to_proto(told)))
    assert "8 blocks, 4 shared, 3 from host memory" in shown


def test_who_stood_before_it_is_named() -> None:
    cell = Told(spec(blocks=12))
    cell.submit(30, 10)
    cell.turns(2)
    large, small = cell.submit(20, 2), cell.submit(2, 2)
    cell.finish()
    told = cell.timeline(small)
    assert large in {interval.behind for interval in told.intervals}
    # And whose it was, by the name that people know.
    said = timeline_to_proto(told, cell.timelines.names(mentioned([told])))
    assert {each.behind_id for each in said.intervals if each.behind_sequence_id} == {f"r{large}"}
    assert any(f"of r{large}, which is before it" in line for line in lines_of("x", said))
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
    assert (first.phase, first.why) == (Phase.UNKNOWN, timeline_track.BEFORE)
    assert first.end_ns - first.start_ns >= 100


def test_a_new_leader_knows_since_when_the_one_before_was_lost() -> None:
    """By the newest record of it: who came after that waited for nobody but a leader."""
    cell = Told(spec(slots=1))
    running = cell.submit(3, 30)
    cell.turns(5)
    lost_ns = cell.now_ns
    cell.now_ns += 2 * MS
    newcomer = cell.submit(3, 30)
    cell.now_ns += 3 * MS
    cell.timelines = Timelines()
    cell.timelines.leader_lost_at(lost_ns)
    cell.lead_anew()
    cell.finish()
    for one, lost_since_ns in (running, lost_ns), (newcomer, lost_ns + 2 * MS):
        told = cell.timeline(one)
        check(told, cell.requests[one].arrived_ns)
        (lost,) = [each for each in told.intervals if each.why == timeline_track.LEADER_LOST]
        assert (lost.phase, lost.start_ns) == (Phase.QUEUE, lost_since_ns)
        assert lost.end_ns - lost_ns >= 5 * MS


def test_a_store_that_is_late_with_each_record_holds_nobody_up() -> None:
    """Acknowledged 60 ms late, one after the other, while steps of 10 ms go on."""
    cell = Told(spec(slots=1), lease=1)
    one, behind = cell.submit(3, 60), cell.submit(3, 5)
    decided: deque[int] = deque()
    for _ in range(40):
        cell.turn()
        decided.append(cell.now_ns)
        cell.now_ns += 10 * MS
        if len(decided) > 6:
            at_ns = decided.popleft()
            cell.timelines.committed(at_ns, at_ns, cell.now_ns)
    assert not cell.stalls(one)
    assert Why.STORE_BEHIND.value not in cell.whys(behind)
    # Nobody is told of anything for half a second: who decodes stalls, who waits does not for that.
    since_ns = cell.now_ns
    for _ in range(5):
        cell.turn()
        cell.now_ns += 100 * MS
    told_ns = cell.now_ns
    cell.timelines.committed(decided[0], told_ns, told_ns)
    cell.turn()
    (stall,) = cell.stalls(one)
    assert (stall.why, stall.end_ns) == (Why.STORE_BEHIND.value, told_ns)
    assert stall.start_ns <= since_ns
    assert Why.STORE_BEHIND.value not in cell.whys(behind)
    cell.finish()


def test_a_replay_of_both_leaderships_knows_it() -> None:
    cell = Told(spec(slots=2))
    one = cell.submit(3, 30)
    cell.turns(5)
    cell.now_ns += 100
    cell.lead_anew()
    cell.finish()
    check(cell.timeline(one), cell.requests[one].arrived_ns)
    assert timeline_track.LEADER_LOST in cell.whys(one)
    assert Phase.UNKNOWN not in {interval.phase for interval in cell.timeline(one).intervals}


def test_what_a_leader_takes_along_is_laid_to_its_loss() -> None:
    """Its last records are in no archive: a request that came with them is resumed with tokens."""
    cell = Told(spec(slots=2))
    cell.submit(3, 30)
    cell.turns(5)
    archived, cell.timelines = cell.timelines, Timelines()
    cell.now_ns += 100
    one = cell.submit(3, 30)
    cell.turns(5)
    cell.now_ns += 50
    cell.timelines = archived
    archived.lead_anew(cell.now_ns)
    cell.lead_anew()
    cell.finish()
    told = cell.timeline(one)
    check(told, cell.requests[one].arrived_ns)
    first = told.intervals[0]
    assert (first.phase, first.why) == (Phase.QUEUE, timeline_track.LEADER_LOST)
    assert first.end_ns - first.start_ns >= 55
    assert Phase.UNKNOWN not in {interval.phase for interval in told.intervals}


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
    monkeypatch.setattr(timeline_track, "TRANSITIONS_MAX", 12)
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
    assert (first.phase, first.why) == (Phase.UNKNOWN, timeline_track.TOO_LONG_AGO)
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


def test_what_lives_has_lived_until_now_though_nothing_was_decided_since() -> None:
    """A worker that hangs gives the core nothing to decide; who asks then is told how long."""
    cell = Told(spec(slots=1), lease=1)
    running, waiting = cell.submit(9, 20), cell.submit(9, 20)
    cell.turns(3)
    now_ns = cell.now_ns + 10**10
    for sequence_id, phase, why in [
        (running, Phase.STALL, timeline_intervals.NO_ANSWER),
        (waiting, Phase.QUEUE, Why.NO_SLOT.value),
    ]:
        (told,) = timelines_of(cell.timelines.snapshot(f"r{sequence_id}", now_ns))
        last = told.intervals[-1]
        assert (last.end_ns, last.phase, last.why) == (now_ns, phase, why)
