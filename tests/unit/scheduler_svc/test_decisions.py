"""Each iteration's decision as its reader is told it: nothing missing, and the right reasons."""

from dataclasses import replace
from typing import Any

import pytest

from ledger.archive.reader import Cursor
from scheduler_svc.archive_replay import lines_of, plain
from scheduler_svc.core.commands import Command, StepDone
from scheduler_svc.core.outcome import Outcome, Why
from scheduler_svc.core.types import FLEX_PRIORITY
from scheduler_svc.decisions import WAITING_TOLD_MAX, Blocks, Decision, Decisions, Measured
from scheduler_svc.timeline_track import NO_BLOCKS
from tests.sim.test_scheduler_sim import World
from tests.support.cell import Cell, spec


class Read(Cell):
    """A cell whose decisions are read."""

    def __init__(self, *specs: Any, **knobs: Any) -> None:
        self.decisions, self.said = Decisions(), list[Decision | Measured]()
        super().__init__(*specs, **knobs)

    def see(self, command: Command, outcome: Outcome) -> None:
        super().see(command, outcome)
        said = self.decisions.take(command, outcome, self.now_ns, self.scheduler)
        if said is not None:
            self.said.append(said)

    def decided(self) -> Decision:
        """The newest."""
        return [said for said in self.said if isinstance(said, Decision)][-1]


def waits(said: Decision) -> dict[int, tuple[str, int | None]]:
    return {each.sequence_id: (each.why, each.behind) for each in said.waits}


def test_who_is_scheduled_with_what() -> None:
    cell = Read(spec(slots=4, step_tokens=40, mixed_tokens=24), lease=1, in_flight=1)
    prompt = tuple(range(1, 17))
    one = cell.submit(prompt, 30)
    cell.turns(3)
    two = cell.submit((*prompt[:12], *range(100, 130)), 3)
    cell.turn()
    said = cell.decided()
    (admitted,) = said.admitted
    assert admitted == (two, f"r{two}", 1, 42, 12, 11, 3, 0)
    assert said.chunks == ((two, 23),)
    assert (said.decode_rows, said.tokens, said.budget, said.lease_steps) == (1, 24, 24, 1)
    assert isinstance(said.blocks, Blocks)
    assert said.blocks.shared == 3
    assert said.blocks.allocated >= 8
    assert said.blocks.free == cell.worker().kv.free_count
    assert (said.waits, said.waiting) == ((), 0)
    assert dict(said.stages)["lease"] == Why.PREFILL.value
    assert said.concerns({two})
    assert not said.concerns({one, 99})
    told = "\n".join(lines_of(said, Cursor(7, 9)))
    assert f"admitted   {two} (r{two}), slot 1: 42 tokens, 12 cached; 11 blocks, 3 shared" in told
    assert plain(said)["blocks"] == said.blocks._asdict()


@pytest.mark.parametrize("count", [8, 40])
def test_those_who_wait_for_their_own_tenants_are_no_reason_for_others(count: int) -> None:
    """Seen: each look of a plan told of them again, until there was no room for why it ended."""
    cell = Read(spec(slots=64), policy="fair", lease=1)
    for tenant in range(count):
        for _ in range(2):
            cell.submit(4, 20, tenant=f"full {tenant}", tenant_tokens=24)
    while len(cell.running()) < count:
        cell.turn()
    others = [cell.submit(3, 20, tenant="other") for _ in range(20)]
    admitted = cell.must_plan().admitted
    assert 3 < len(admitted) < len(others)
    told = waits(cell.decided())
    left = (told[one] for one in others if one not in admitted)
    assert set(left) == {(Why.NO_BUDGET.value, None)}


def test_every_one_that_waits_has_its_reason() -> None:
    """Who does not fit, who stands behind it, and whose tenant has enough."""
    cell = Read(spec(blocks=12, slots=8), tenant_tokens=60, lease=1)
    cell.submit(30, 10, tenant="a")
    cell.turn()
    large = cell.submit(20, 2, tenant="b")
    small = cell.submit(2, 2, tenant="b")
    throttled = [cell.submit(30, 10, tenant="a") for _ in range(2)]
    cell.turns(2)
    told = waits(cell.decided())
    assert told[large] == (Why.BLOCKS.value, None)
    assert told[small] == (Why.BLOCKS.value, large)
    assert {told[one] for one in throttled} == {(Why.TENANT.value, None)}
    shown = "\n".join(lines_of(cell.decided(), Cursor(7, 9)))
    assert f"waits      {small} (r{small}): too few blocks are free (of {large}, which" in shown
    cell.finish()


def test_of_a_long_queue_the_first_are_told_and_all_are_counted() -> None:
    cell = Read(spec(slots=1), lease=1)
    for _ in range(WAITING_TOLD_MAX + 7):
        cell.submit(2, 9)
    cell.turns(2)
    said = cell.decided()
    assert (len(said.waits), said.waiting) == (WAITING_TOLD_MAX, WAITING_TOLD_MAX + 6)
    assert [*lines_of(said, Cursor(7, 9))][-1].endswith("and 6 behind them")


def test_who_left_and_why_and_what_was_forgotten_for_others() -> None:
    cell = Read(spec(blocks=8, slots=2), lease=1)
    two = [cell.submit(8, 20), cell.submit(8, 20)]
    cell.finish()
    left = [each for said in cell.said if isinstance(said, Decision) for each in said.preempted]
    assert left
    assert {why for _, why in left} == {NO_BLOCKS}
    assert {one for one, _ in left} <= {*two}
    decided = [said for said in cell.said if isinstance(said, Decision)]
    blocks = [said.blocks for said in decided if isinstance(said.blocks, Blocks)]
    assert sum(each.evicted for each in blocks) > 0
    pool = cell.worker().kv
    assert sum(each.allocated for each in blocks) == pool.counts[0]

    cell = Read(spec(slots=1))
    flex = cell.submit(3, 30, priority=FLEX_PRIORITY)
    cell.turns(2)
    cell.submit(3, 9)
    cell.turn()
    assert cell.decided().preempted == ((flex, Why.PLACE_NEEDED.value),)


def test_what_steps_took_stands_beside_what_was_expected() -> None:
    cell = Read(spec(slots=2), lease=2)
    cell.submit(3, 40)
    for _ in range(20):
        cell.plan()
        cell.commit(replace(cell.compute(), step_us=2000, is_graph=True))
    last = cell.said[-1]
    assert isinstance(last, Measured)
    assert (last.step_us, last.rows, last.is_graph) == (2000, 1, True)
    assert abs(last.expected_us - 2000) < 100
    (line,) = lines_of(replace(last, expected_us=1900), Cursor(7, 9))
    assert line.endswith("2.0 ms, 1.9 ms expected, 1 row with a token, one graph")
    # Whose prompt is computed by a plan's first step decodes in those after it.
    cell.finish()
    cell.submit(3, 40)
    cell.plan()
    decided = cell.decided()
    assert (decided.decode_rows, decided.lease_steps) == (0, 2)
    for _ in range(2):
        cell.commit(replace(cell.compute(), step_us=2000))
    last = cell.said[-1]
    assert isinstance(last, Measured)
    assert last.step == 1
    assert abs(last.expected_us - 2000) < 100


def test_a_row_with_a_token_is_one_however_many_it_has() -> None:
    cell = Read(spec(slots=2, slot_tokens=4), lease=1)
    for _ in range(2):
        cell.submit(3, 40)
    cell.finish()
    assert cell.workers["w1"].steps_total < 39
    assert {said.rows for said in cell.said if isinstance(said, Measured)} == {0, 1, 2}


class ReadWorld(World):
    def apply(self, command: Command) -> Outcome:
        self.__dict__.setdefault("decisions", Decisions())
        outcome = super().apply(command)
        said = self.decisions.take(  # type: ignore[attr-defined]
            command, outcome, self.now_ns, self.scheduler
        )
        if isinstance(said, Decision):
            self.judge_decision(said, outcome)
        assert isinstance(said, Measured) == isinstance(command, StepDone)
        return outcome

    def judge_decision(self, said: Decision, outcome: Outcome) -> None:
        assert outcome.plan is not None
        assert tuple(each.sequence_id for each in said.admitted) == outcome.plan.admitted
        assert tuple(one for one, _ in said.preempted) == outcome.plan.preempted
        assert sum(count for _, count in said.chunks) == outcome.plan.chunk_tokens
        assert len(said.waits) == min(WAITING_TOLD_MAX, said.waiting)
        assert all(each.why and each.request_id for each in said.waits)
        assert min(said.blocks) >= 0
        assert all([*lines_of(said, Cursor(1, 1))])


def test_whatever_is_decided_is_told() -> None:
    for seed in range(6):
        world = ReadWorld(seed)
        world.run(turns=60, requests=25)
