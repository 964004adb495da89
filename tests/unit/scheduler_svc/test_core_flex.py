"""Flex requests: they wait for all others, give way to them, and leave their gaps short."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_svc.core.commands import MakePlan
from scheduler_svc.core.cost import StepCost
from scheduler_svc.core.outcome import Why
from scheduler_svc.core.policy.presets import RULES
from scheduler_svc.core.policy.rules import TABLES
from scheduler_svc.core.types import FLEX_PRIORITY
from scheduler_svc.core.workers import HOLD_US
from tests.support.cell import Cell, spec

ORDERS = [order for order in TABLES["order"] if order != "fair"] + [
    "fair",
    "fair:shortest",
    "fair:prefix",
]


def flex(cell: Cell, prompt: int = 3, max_tokens: int = 5, **more: Any) -> int:
    return cell.submit(prompt, max_tokens, priority=FLEX_PRIORITY, **more)


def left(cell: Cell) -> Mapping[int, int]:
    """By sequence, preemptions that are counted."""
    return {s.sequence_id: s.num_preemptions for s in cell.scheduler.waiting}


@pytest.mark.parametrize("order", ORDERS)
def test_it_stands_behind_all_others_in_every_order(order: str) -> None:
    """Whoever came later, has had more, asks for more, and has all the time in the world."""
    cell = Cell(spec(slots=1), order=order)
    cell.submit(3, 40)
    cell.turn()
    first, second = flex(cell, 1, 1, tenant="poor", deadline_ns=1000), flex(cell, 1, 2)
    late = cell.submit(30, 40, tenant="rich")
    assert cell.waiting()[0] == late
    assert sorted(cell.waiting()[1:]) == [first, second]
    later = cell.submit(30, 40, tenant="poor")
    assert set(cell.waiting()[:2]) == {late, later}
    cell.finish()


@pytest.mark.parametrize("order", ORDERS)
def test_nor_does_one_join_before_them(order: str) -> None:
    """Seen: an order by cached prefix put older ones first, and at these the look ended."""
    cell = Cell(spec(slots=2), order=order)
    for _ in range(5):
        flex(cell)
    cell.turn()
    cell.now_ns += 10**9
    late = cell.submit(30, 40)
    assert cell.must_plan().admitted == (late,)
    cell.finish()


def test_a_prefix_puts_none_before_another_tenants() -> None:
    cell = Cell(spec(slots=1), order="fair:prefix", policy="fair")
    cell.submit(3, 9, tenant="served")
    cell.turn()
    own, line = cell.submit(3, 9, tenant="a"), flex(cell, tenant="a")
    other = cell.submit(3, 9, tenant="b")
    joined = [join for plan in cell.finish() for join in plan.admitted]
    assert joined == [own, other, line]


def test_the_least_priority_but_one_is_not_flex() -> None:
    cell = Cell(spec(slots=1))
    cell.submit(3, 9)
    cell.turn()
    first = cell.submit(3, 2, priority=FLEX_PRIORITY + 1)
    second = cell.submit(3, 2)
    assert cell.waiting() == [first, second]
    cell.finish()


def test_nobody_promised_it_how_long_it_waits() -> None:
    cell = Cell(spec(slots=1), wait_ns_max=5)
    cell.submit(3, 9)
    poor = flex(cell)
    cell.turn()
    cell.now_ns += 100
    other = cell.submit(3, 2)
    assert cell.scheduler.waiting.overdue(cell.now_ns) == []
    assert cell.waiting() == [other, poor]
    cell.finish()


@pytest.mark.parametrize("policy", RULES)
def test_a_slot_is_given_up_with_the_next_plan(policy: str) -> None:
    """The newest gives it up, and what it was short of was no blocks."""
    cell = Cell(spec(slots=3), policy=policy)
    batch = [flex(cell, 3, 30) for _ in range(4)]
    cell.turns(4)
    assert cell.running() == batch[:3]
    live = cell.submit(3, 5)
    if policy == "static":
        # Nobody joins a batch that has not run out, but all of this one may go, and come back.
        assert cell.must_plan().preempted == (3, 2, 1)
        assert cell.running() == [1, 2, live]
    else:
        plan = cell.must_plan()
        assert (plan.preempted, [join.sequence_id for join in plan.joins]) == ((3,), [live])
        assert left(cell) == {3: 0, 4: 0}
    cell.finish()


def test_it_gives_way_to_no_flex_request() -> None:
    cell = Cell(spec(slots=2))
    first = [flex(cell, 3, 30), flex(cell, 3, 30)]
    cell.turns(2)
    flex(cell, 1, 1)
    cell.turns(2)
    assert cell.running() == first
    cell.finish()


def test_as_few_as_do_give_their_blocks() -> None:
    """Each has 6 blocks or more, and the newcomer needs 8 and those that stay free beside it."""
    cell = Cell(spec(slots=8, blocks=26))
    batch = [flex(cell, 20, 30) for _ in range(3)]
    cell.turns(4)
    live = cell.submit(30, 2)
    plan = cell.must_plan()
    assert plan.preempted == (batch[2],)
    assert cell.running() == [*batch[:2], live]
    cell.finish()


def test_none_goes_in_vain() -> None:
    """Even without it there are not blocks enough while another runs."""
    cell = Cell(spec(slots=8, blocks=20))
    cell.submit(40, 20)
    poor = flex(cell, 8, 20)
    cell.turns(3)
    live = cell.submit(36, 2)
    plan = cell.plan()
    assert plan is None or not plan.joins
    assert poor in cell.running()
    assert cell.waiting() == [live]
    cell.finish()


def test_a_free_slot_elsewhere_is_taken_first() -> None:
    cell = Cell(spec(slots=2), spec(slots=4))
    batch = [flex(cell, 3, 60) for _ in range(4)]
    cell.turns(2)
    while cell.worker().slots_free:
        batch.append(flex(cell, 3, 60))
        cell.turns(2)
    assert cell.worker("w2").slots_free
    live = cell.submit(3, 5)
    cell.turn()
    assert live in cell.running("w2")
    assert not cell.scheduler.waiting
    cell.finish()


def test_it_is_the_first_victim_however_often_it_was() -> None:
    cell = Cell(spec(slots=4, blocks=14), victim="newest", lease=1, preemptions_max=1)
    poor = flex(cell, 4, 30)
    cell.turns(2)
    lives = [cell.submit(4, 24) for _ in range(2)]
    plans = cell.turns(40)
    assert {gone for plan in plans for gone in plan.preempted} == {poor}
    assert set(lives) <= cell.endings.keys() | set(cell.running())
    cell.finish()


def test_its_prompt_has_what_the_others_leave() -> None:
    cell = Cell(spec(step_tokens=40, mixed_tokens=40), lease=1, in_flight=1)
    one = cell.submit(5, 60)
    cell.turns(2)
    poor = flex(cell, 70, 3)
    rich = cell.submit(30, 3)
    chunks = dict(cell.must_plan().chunks)
    slots = {s.sequence_id: slot for slot, s in cell.worker().running.items()}
    assert {slots[rich]: 30, slots[poor]: 9} == chunks
    cell.step()
    longer = cell.submit(90, 3)
    chunks = dict(cell.must_plan().chunks)
    slots = {s.sequence_id: slot for slot, s in cell.worker().running.items()}
    assert chunks[slots[longer]] >= 38
    assert slots[poor] not in chunks
    assert one in cell.running()
    cell.finish()


@pytest.mark.parametrize("mix", TABLES["mix"])
def test_nobody_sits_out_for_its_prompt(mix: str) -> None:
    cell = Cell(spec(step_tokens=40, mixed_tokens=20), mix=mix, lease=1, in_flight=1)
    cell.submit(5, 60)
    cell.turns(2)
    poor = flex(cell, 30, 3)
    plan = cell.must_plan()
    assert [join.sequence_id for join in plan.joins] == [poor]
    assert 0 not in dict(plan.chunks).values()
    cell.finish()


def test_a_forked_request_gives_way_and_comes_back() -> None:
    cell = Cell(spec(slots=4, blocks=60))
    poor = flex(cell, 9, 30, n=4)
    cell.turns(6)
    assert cell.running() == [poor, poor + 1, poor + 2, poor + 3]
    lives = [cell.submit(3, 9) for _ in range(3)]
    cell.turns(2)
    assert cell.running() == [poor, *lives]
    cell.finish()


# Gaps

BASE_US, TOKEN_US = 2000, 100


def shared(gap_us: int | None, *, slots: int = 64, prompt: int = 8) -> Cell:
    """One sequence decodes for long beside as many flex ones as may."""
    worker = spec(slots=slots, step_tokens=slots + 300, blocks=1000, block_size=16)
    cell = Cell(worker, lease=1, in_flight=1, prefill_tokens=8, batch_gap_us=gap_us)
    cell.workers["w1"].token_us, cell.workers["w1"].base_us = TOKEN_US, BASE_US
    cell.submit(4, 900)
    cell.turns(3)
    for _ in range(220):
        flex(cell, prompt, 20)
    return cell


def steps_us(cell: Cell, steps: int) -> list[int]:
    """What each of so many steps took."""
    took: list[int] = []
    for _ in range(steps):
        cell.now_ns += 1
        while cell.plan() is not None:
            pass
        result = cell.compute()
        cell.commit(result)
        took.append(result.step_us)
    return took


def test_steps_beside_others_take_no_longer_than_the_gap() -> None:
    """And they take nine tenths of it: there is room for 30 rows, some of which are prompts."""
    cell = shared(5000)
    took = steps_us(cell, 160)[60:]
    assert max(took) <= 5500
    assert sum(took) / len(took) >= 4500
    unbound = steps_us(shared(None), 80)[40:]
    assert max(unbound) > 8000


def test_a_prompt_is_cut_to_the_gap() -> None:
    cell = shared(5000, prompt=200)
    took = steps_us(cell, 160)[60:]
    assert max(took) <= 5500
    assert sum(took) / len(took) >= 4500


def test_short_lines_fill_the_gap_to_the_last_token() -> None:
    """Each has a prompt of 6 tokens and goes after 8 steps: every step some join, and none is
    promised more of a step than it has.
    """
    cell = Cell(
        spec(slots=64, step_tokens=364, blocks=1000, block_size=16),
        batch_gap_us=5000,
        itl_target_us=5000,
    )
    cell.workers["w1"].token_us, cell.workers["w1"].base_us = TOKEN_US, BASE_US
    cell.submit(4, 900)
    took = []
    for _ in range(160):
        while len(cell.scheduler.waiting) < 16:
            flex(cell, 6, 8)
        took += steps_us(cell, 1)
    assert max(took[60:]) <= 5500
    assert sum(took[60:]) / 100 >= 4850


def prompt_beside(rows: int) -> tuple[list[int], Cell]:
    """Of each step until a prompt of 300 is computed, its tokens; beside a row that decodes and so
    many flex ones.
    """
    worker = spec(slots=64, step_tokens=364, blocks=1000, block_size=16)
    cell = Cell(worker, lease=1, in_flight=1, batch_gap_us=5000, itl_target_us=5000)
    cell.workers["w1"].token_us, cell.workers["w1"].base_us = TOKEN_US, BASE_US
    cell.submit(4, 900)
    for _ in range(rows):
        flex(cell, 6, 400)
    steps_us(cell, 80)
    live, chunks = cell.submit(300, 5), list[int]()
    while not chunks or cell.sequence(live).gap > 1:
        plan = cell.must_plan()
        slot = next(s for s, one in cell.worker().running.items() if one.sequence_id == live)
        chunks.append(dict(plan.chunks)[slot])
        took = cell.compute()
        assert took.step_us <= 5500
        cell.commit(took)
    return chunks, cell


def test_rows_sit_out_while_prompts_of_others_fill_the_step() -> None:
    """So the first token comes as soon as if they were not there; then they go on where they were,
    and nobody has left.
    """
    alone, _ = prompt_beside(0)
    beside, cell = prompt_beside(24)
    assert len(beside) <= len(alone) + 1
    assert len(cell.worker().flex) == 24
    plan = cell.must_plan()
    assert (plan.preempted, 0 in dict(plan.chunks).values()) == ((), False)


def test_a_gap_that_nothing_meets_keeps_them_waiting() -> None:
    cell = shared(1000)
    steps_us(cell, 60)
    assert len(cell.running()) == 1
    passed_over = cell.apply(MakePlan(worker_id="w1")).passed_over
    assert Why.BATCH_GAP in {over.why for over in passed_over}


def test_alone_they_fill_the_batch_and_leave_when_somebody_comes() -> None:
    """Sixty rows take 8 ms, and thirty the gap of 5: half of them go, in a few steps, and stay
    away until there is nobody else.
    """
    worker = spec(slots=60, step_tokens=400, blocks=1000, block_size=16)
    cell = Cell(worker, lease=1, in_flight=1, batch_gap_us=5000)
    cell.workers["w1"].token_us, cell.workers["w1"].base_us = TOKEN_US, BASE_US
    for _ in range(120):
        flex(cell, 4, 400)
    steps_us(cell, 60)
    assert len(cell.running()) == 60
    live = cell.submit(4, 100)
    took = steps_us(cell, 60)
    assert live in cell.running()
    assert max(took[20:]) <= 5500
    assert sum(took[20:]) / 40 >= 4500
    gone = sum(len(plan.preempted) for plan in cell.turns(20))
    assert gone == 0
    steps_us(cell, 60)
    assert len(cell.running()) == 60


def test_who_stays_makes_steps_a_twentieth_too_long_and_no_more() -> None:
    """By a tenth, 34 of 128 rows would stay with those who came, and take 5.4 ms; and where the fit
    is still wrong by as much as it may be, steps would be longer than the gap and a tenth.
    """
    worker = spec(slots=128, step_tokens=400, blocks=1000, block_size=16)
    cell = Cell(worker, lease=1, in_flight=1, batch_gap_us=5000)
    cell.workers["w1"].token_us, cell.workers["w1"].base_us = TOKEN_US, BASE_US
    for _ in range(200):
        flex(cell, 4, 400)
    steps_us(cell, 60)
    cell.submit(4, 100)
    assert max(steps_us(cell, 60)[20:]) <= 5250
    assert sum(len(plan.preempted) for plan in cell.turns(20)) == 0


def test_rows_that_fit_are_found_from_both_sides() -> None:
    """Steps take 2 ms and 0.1 for each row, so that 30 rows take 5 ms."""
    for rows in (1, 60):
        cost = StepCost()
        for _ in range(40):
            for _ in range(20):
                cost.observe(BASE_US + TOKEN_US * rows, decodes=rows, prompt_tokens=0)
            fit = cost.decodes_in(5000, near=rows)
            assert fit is not None
            rows = fit
        assert rows == pytest.approx(30, abs=2)


def test_of_a_worker_that_has_answered_nothing_no_rows_are_known() -> None:
    assert StepCost().decodes_in(5000, near=4) is None


# Who comes in the middle of a step. Steps of 16 rows take 9.6 ms.

LONG_US = 8000


def filled(gap_us: int | None = 12_000, **knobs: Any) -> Cell:
    """A sequence that goes on beside as many flex ones as there are slots but four, and time."""
    cell = Cell(spec(slots=20, step_tokens=120), batch_gap_us=gap_us, **knobs)
    cell.workers["w1"].token_us, cell.workers["w1"].base_us = TOKEN_US, LONG_US
    cell.submit(4, 900)
    for _ in range(15):
        flex(cell, 6, 200)
    for _ in range(12):
        run_step(cell)
    assert len(cell.running()) == 16
    return cell


def plan_all(cell: Cell) -> int | None:
    """When to ask again."""
    while (outcome := cell.apply(MakePlan(worker_id="w1"))).plan is not None:
        cell.workers["w1"].send(outcome.plan)
    return outcome.again_ns


def run_step(cell: Cell, *comes: tuple[float, int]) -> int:
    """One step in its time, and who comes at which part of it with so many tokens; what it took."""
    plan_all(cell)
    began_ns, result = cell.now_ns, cell.compute()
    asks = [(began_ns + int(part * 1000 * result.step_us), tokens) for part, tokens in comes]
    for at_ns, tokens in asks:
        cell.now_ns = at_ns
        cell.submit(tokens, 4)
        plan_all(cell)
    end_ns = began_ns + 1000 * result.step_us
    again_ns = plan_all(cell)
    if again_ns is not None and again_ns < end_ns:
        cell.now_ns = again_ns
        plan_all(cell)
    cell.now_ns = end_ns
    cell.commit(result)
    return result.step_us


def test_a_plan_waits_for_the_end_of_a_step_that_flex_sequences_make_long() -> None:
    """And whoever comes meanwhile is in it. Nobody is kept waiting where there is no gap to keep,
    no flex sequence, or no step under way.
    """
    cell = filled()
    plan_all(cell)
    began_ns, result = cell.now_ns, cell.compute()
    cell.now_ns += 1_000_000
    first = cell.submit(5, 4)
    again_ns = plan_all(cell)
    assert again_ns is not None
    assert again_ns == pytest.approx(began_ns + 1000 * result.step_us - 5_000_000, abs=500_000)
    cell.now_ns += 1_000_000
    second = cell.submit(5, 4)
    assert plan_all(cell) == again_ns
    assert {first, second} <= set(cell.waiting())
    cell.now_ns = again_ns
    assert {join.sequence_id for join in cell.must_plan().joins} == {first, second}
    cell.commit(result)
    assert {first, second} <= set(cell.step().sequence_ids)
    alone, unbound = filled(), filled(None)
    for sequence_id in [s.sequence_id for s in alone.worker().flex.values()]:
        alone.cancel(sequence_id)
    for other in (alone, unbound):
        plan_all(other)
        other.compute()
        late = other.submit(5, 4)
        assert plan_all(other) is None
        assert late in other.running()


def test_a_plan_is_made_the_earlier_the_longer_a_worker_stands_still_for_it() -> None:
    """Until it hardly does. Where it does not any more, plans are made as late as before."""
    worker = filled().worker()
    assert worker.hold_us == HOLD_US

    def steps(count: int, plan_us: int) -> None:
        """Of 9.6 ms, each begun as much too late as plans take longer than they are given."""
        for _ in range(count):
            late_us = max(0, plan_us - worker.hold_us)
            worker.end_step(9600, worker.step_began_ns + 1000 * (9600 + late_us))

    steps(100, plan_us=12_000)
    assert 10_500 <= worker.hold_us <= 12_000
    steps(300, plan_us=1000)
    assert worker.hold_us <= HOLD_US + 50


@settings(max_examples=20)
@given(part=st.floats(0.01, 0.99), tokens=st.integers(2, 50))
def test_who_comes_in_the_middle_of_a_step_waits_for_its_end_and_half_of_the_next(
    part: float, tokens: int
) -> None:
    """At most: a plan may be on its way already. Its own step is as short as its prompt."""
    cell = filled()
    asked = cell.next_sequence_id
    took = [run_step(cell, (part, tokens))]
    waits_us = took[0] * (1 - part)
    while not cell.outputs[asked]:
        took.append(run_step(cell))
        waits_us += took[-1]
    assert took[-1] <= LONG_US + (tokens + 1) * TOKEN_US
    assert waits_us - took[-1] <= 12_000 + 5_000
    assert len(took) == 2 or part * took[0] >= took[0] - 5_000


def test_a_tenth_of_the_steps_are_spared_for_first_tokens() -> None:
    """Short ones come again and again: flex sequences sit out for the first of them at once, and
    then as often as they may; nobody leaves for it.
    """
    cell = filled()
    flex_tokens = [sum(map(len, map(cell.outputs.get, range(2, 17))))]  # type: ignore[arg-type]
    for _ in range(100):
        run_step(cell, (0.1, 5))
        flex_tokens.append(sum(map(len, map(cell.outputs.get, range(2, 17)))))  # type: ignore[arg-type]
    idle = sum(before == after for before, after in pairwise(flex_tokens))
    assert 10 <= idle <= 14
    assert {s.num_preemptions for s in cell.worker().flex.values()} == {0}
