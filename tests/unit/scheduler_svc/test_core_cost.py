"""What steps take, and what follows: how large a chunk is, and which deadline cannot be kept."""

from itertools import pairwise

import pytest

from scheduler_svc.core.cost import StepCost
from scheduler_svc.core.outcome import Finished
from scheduler_svc.core.types import Reason
from tests.support.cell import Cell, spec

TOKEN_US = 100


def test_nothing_is_known_of_a_worker_that_has_answered_nothing() -> None:
    cost = StepCost()
    assert cost.decode_us(8) == 0
    assert cost.prefill_us(1000) == 0
    assert cost.prompt_tokens_in(50_000, decodes=8) is None


def test_the_fit_finds_what_the_steps_were_made_of() -> None:
    """Rows that decode and prompt tokens, each at its own price."""
    cost = StepCost()
    for step in range(200):
        rows, tokens = 8 + step % 8, step * 37 % 256
        cost.observe(3000 + 40 * tokens, decodes=rows, prompt_tokens=tokens)
    assert cost.decode_us(8) == pytest.approx(3000, rel=0.01)
    assert cost.prefill_us(1000) == pytest.approx(40_000, rel=0.01)
    assert cost.prompt_tokens_in(13_000, decodes=12) == pytest.approx(250, rel=0.01)


def test_rows_stand_in_for_more_and_for_fewer_that_were_not_seen() -> None:
    cost = StepCost()
    cost.observe(2000, decodes=3, prompt_tokens=0)
    assert [cost.decode_us(rows) for rows in (0, 1, 3, 4, 64)] == [0, 2000, 2000, 2000, 2000]


def test_the_fit_follows_a_drift_and_forgets_an_outlier() -> None:
    cost = StepCost()
    cost.observe(1000, decodes=4, prompt_tokens=0)
    cost.observe(64_000, decodes=4, prompt_tokens=0)
    for _ in range(60):
        cost.observe(2000, decodes=4, prompt_tokens=0)
    assert cost.decode_us(4) == pytest.approx(2000, rel=0.05)


def test_steps_that_have_both_teach_what_each_adds() -> None:
    """No step is without a prompt, as beside a batch of short lines."""
    cost = StepCost()
    for step in range(200):
        rows, tokens = 20 + step * 7 % 41, 6 + step * 5 % 19
        cost.observe(2000 + 100 * (rows + tokens), decodes=rows, prompt_tokens=tokens)
    assert cost.decode_us(50) == pytest.approx(7000, rel=0.02)
    assert cost.prompt_tokens_in(10_000, decodes=60) == pytest.approx(20, abs=1)


def test_prices_do_not_drift_while_nothing_tells_of_them() -> None:
    """Steps of one length, as a bound makes them, whatever they are made of."""
    cost = StepCost()
    for step in range(5000):
        rows = 20 + step * 7 % 41 if step < 100 else 60 + step % 3
        tokens = 6 + step * 5 % 19 if step < 100 else 80 - rows
        cost.observe(2000 + 100 * (rows + tokens), decodes=rows, prompt_tokens=tokens)
    assert cost.prompt_tokens_in(10_000, decodes=3) == pytest.approx(77, abs=4)


def test_what_was_seen_once_is_not_believed_for_ever() -> None:
    """A first step is slow; without it nobody would ever go there again."""
    cost = StepCost()
    cost.observe(30_000, decodes=72, prompt_tokens=4)
    for step in range(400):
        rows = 20 + step * 7 % 41
        cost.observe(2000 + 100 * (rows + step % 9), decodes=rows, prompt_tokens=step % 9)
    assert cost.decode_us(72) == pytest.approx(9200, rel=0.05)


def test_a_step_that_is_faster_than_its_decodes_alone_costs_no_less_than_nothing() -> None:
    cost = StepCost()
    cost.observe(5000, decodes=4, prompt_tokens=0)
    cost.observe(4000, decodes=4, prompt_tokens=16)
    assert cost.prefill_us(1000) == 0
    fits = cost.prompt_tokens_in(6000, decodes=4)
    assert fits is not None
    assert fits > 1_000_000, "only the worker's own bound counts"


def running(target_us: int | None, *, token_us: int = TOKEN_US) -> Cell:
    """One sequence decodes on a worker that takes so long for each token of a step."""
    cell = Cell(
        spec(blocks=400, slots=8, step_tokens=264, mixed_tokens=136),
        lease=1,
        in_flight=1,
        itl_target_us=target_us,
    )
    cell.workers["w1"].token_us = token_us
    cell.submit(20, 150)
    cell.turns(3)
    return cell


def chunk_tokens(cell: Cell, prompt: int) -> list[int]:
    """Prompt tokens of each step until one of a new prompt's choices decodes."""
    cell.submit(prompt, 3)
    chunks: list[int] = []
    while sum(chunks) < prompt:
        chunks.append(sum(plan.chunk_tokens for plan in cell.turn()))
    return chunks


def test_a_target_sizes_the_chunks_beside_decodes() -> None:
    """3 ms, of which the row that decodes takes 0.1, and each prompt token as much."""
    assert chunk_tokens(running(None), 300) == [135, 135, 30]
    assert set(chunk_tokens(running(3000), 290)) == {29}


def test_a_target_that_nothing_can_meet_leaves_every_prefill_its_minimum() -> None:
    assert set(chunk_tokens(running(1000, token_us=5000), 160)) == {16}


def test_the_bound_of_the_worker_holds_whatever_the_target() -> None:
    assert chunk_tokens(running(10_000_000), 300) == [135, 135, 30]


def test_where_nobody_decodes_the_step_is_as_large_as_it_may_be() -> None:
    cell = running(3000)
    cell.cancel(1)
    assert chunk_tokens(cell, 500) == [264, 236]


def test_a_worker_that_tells_no_times_is_bounded_by_tokens() -> None:
    assert chunk_tokens(running(3000, token_us=0), 300) == [135, 135, 30]


# A prompt of 1000 tokens takes 100 ms at the pace of the steps so far, and half of it at best.
PROMPT, LEAST_NS = 1000, 50_000_000


def with_deadline(left_ns: int) -> tuple[Cell, int]:
    """Somebody waits whose deadline is in so long, behind one that has the only slot."""
    cell = Cell(spec(blocks=400, slots=1, step_tokens=264))
    cell.workers["w1"].token_us = TOKEN_US
    cell.submit(264, 400)
    cell.turns(3)
    return cell, cell.submit(PROMPT, 3, deadline_ns=cell.now_ns + left_ns)


def test_who_cannot_make_its_deadline_is_refused_before_prefill() -> None:
    cell, late = with_deadline(LEAST_NS + 10_000_000)
    assert cell.expire() == ()
    woken_ns = cell.scheduler.next_deadline_ns()
    assert woken_ns is not None
    cell.now_ns = woken_ns + 1
    assert cell.requests[late].deadline_ns == pytest.approx(cell.now_ns + LEAST_NS, rel=0.02)
    ending, _ = cell.expire()
    assert isinstance(ending, Finished)
    assert (ending.sequence_id, ending.reason) == (late, Reason.DEADLINE_EXCEEDED)
    assert ending.error == (
        "the prompt of 1000 tokens takes 50 ms or more, and only 49 ms were left until the deadline"
    )


def test_who_was_let_in_is_not_judged_any_more() -> None:
    cell, late = with_deadline(LEAST_NS + 10_000_000)
    cell.cancel(1)
    assert len(cell.must_plan().joins) == 1
    woken_ns = cell.scheduler.next_deadline_ns()
    assert woken_ns is not None
    cell.now_ns = woken_ns + 1
    assert cell.expire() == ()
    cell.finish()
    assert cell.endings[late].reason is Reason.LENGTH


def test_short_prompts_do_not_make_a_long_one_hopeless() -> None:
    """A step takes 20 ms whatever is in it; at the pace of 5 tokens a step, 400 take 1.6 s."""
    cell = Cell(spec(blocks=400, slots=4, step_tokens=512))
    worker = cell.workers["w1"]
    worker.base_us, worker.token_us = 20_000, TOKEN_US
    for _ in range(4):
        cell.submit(5, 8)
        while cell.scheduler.live_count:
            cell.turn()
    long = cell.submit(400, 3, deadline_ns=cell.now_ns + 500_000_000)
    assert cell.expire() == ()
    cell.finish()
    assert cell.endings[long].reason is Reason.LENGTH


def test_the_least_that_a_prompt_takes_is_that_of_full_steps() -> None:
    cost = StepCost()
    for step in range(64):
        tokens = 1000 if step % 4 else 10
        cost.observe(20_000 + 100 * tokens, decodes=0, prompt_tokens=tokens)
    assert cost.prefill_us_least(10_000, 1000) == pytest.approx(1_200_000, rel=0.02)
    assert cost.prefill_us_least(10_000, 4000) == pytest.approx(300_000, rel=0.02)


def test_a_deadline_without_a_fit_is_only_kept_or_missed() -> None:
    cell = Cell(spec(blocks=400, slots=1, step_tokens=264))
    cell.submit(20, 400)
    cell.turns(3)
    late = cell.submit(PROMPT, 3, deadline_ns=cell.now_ns + 10)
    assert cell.expire() == ()
    cell.now_ns += 10
    cell.expire()
    assert cell.endings[late].error == ""


@pytest.mark.parametrize(
    ("token_us", "gap"),
    [
        pytest.param(0, 4, id="half of the lease where nothing is known"),
        pytest.param(500, 4, id="no later for steps of 1 ms"),
        pytest.param(2000, 5, id="3 steps of 4 ms before it ends"),
        pytest.param(50_000, 7, id="a long step before it ends"),
    ],
)
def test_a_lease_is_renewed_when_the_next_plan_could_come_too_late(token_us: int, gap: int) -> None:
    cell = Cell(spec(), lease=8)
    cell.workers["w1"].token_us = token_us
    cell.submit(3, 400)
    cell.submit(3, 400)
    cell.turns(40)
    turns = [bool(cell.turn()) for _ in range(80)]
    planned = [turn for turn, has_plan in enumerate(turns) if has_plan]
    assert {after - before for before, after in pairwise(planned)} == {gap}


def test_few_plans_while_the_pool_keeps_the_queue_waiting() -> None:
    """16 rows of some 300 tokens each, as many blocks as they need, and always somebody behind
    them; steps of 16 ms.
    """
    worker = spec(blocks=16 * 24, block_size=16, slots=32, step_tokens=544)
    cell = Cell(worker, admission="guaranteed_no_evict")
    cell.workers["w1"].token_us = 1000
    for number in range(64):
        cell.submit(64, 350 - number * 37 % 100)
    cell.turns(200)
    plans = sum(len(cell.turns(1)) for _ in range(600))
    assert len(cell.scheduler.waiting) > 0
    assert plans <= 0.3 * 600


def test_prefills_that_began_before_the_fit_get_on_with_a_budget_of_one() -> None:
    """They were let in by the worker's own bound; then steps turn out to be far too long."""
    worker = spec(blocks=400, slots=8, step_tokens=264, mixed_tokens=136)
    cell = Cell(worker, lease=1, in_flight=1, prefill_tokens=1, itl_target_us=1000)
    cell.submit(20, 150)
    cell.turns(3)
    cell.workers["w1"].token_us = 5000
    for _ in range(3):
        cell.submit(300, 3)
    chunks = [plan.chunk_tokens for plan in cell.turns(20)]
    assert chunks[0] > 100
    assert set(chunks[1:]) == {1}
