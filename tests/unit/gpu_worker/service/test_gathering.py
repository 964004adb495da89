"""Which results of a lease wait for the next, and which take all before them along."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.batch.plans import FinishReason, StepOutcome, StepResult, StepTimings
from gpu_worker.service.gathering import Gathering

PLAIN = StepResult(
    plan_id=1,
    step=0,
    outcome=StepOutcome(slots=(0,), token_ids=(5,)),
    is_last=False,
    timings=StepTimings(wait_us=0, forward_us=0, sample_us=0, tokens_computed=1, rows=1),
)
AWAITED = (
    replace(PLAIN, is_last=True),
    replace(PLAIN, outcome=replace(PLAIN.outcome, finished=((0, FinishReason.STOP),))),
    replace(PLAIN, outcome=replace(PLAIN.outcome, errors=((0, "broken"),))),
    replace(PLAIN, timings=replace(PLAIN.timings, tokens_computed=7)),
)


def sizes(gather_s: float, *, step_s: float, count: int) -> list[int]:
    gathering = Gathering(gather_s)
    return [len(gathering.add(PLAIN, 100 + step_s * index)) for index in range(count)]


def test_plain_results_are_gathered_while_the_next_is_in_time() -> None:
    assert sizes(0.0, step_s=0.01, count=4) == [1, 1, 1, 1]
    assert sizes(0.030, step_s=0.013, count=6) == [1, 0, 2, 0, 2, 0]
    assert sizes(0.030, step_s=0.007, count=9) == [1, 0, 0, 0, 4, 0, 0, 0, 4]
    # Slower than the gathering: nothing waits for a step that comes too late.
    assert sizes(0.030, step_s=0.050, count=4) == [1, 1, 1, 1]


def test_what_somebody_waits_for_takes_everything_along() -> None:
    for awaited in AWAITED:
        gathering = Gathering(1.0)
        assert gathering.add(PLAIN, 0.0) == [PLAIN]
        assert gathering.add(PLAIN, 0.01) == []
        assert gathering.add(awaited, 0.02) == [PLAIN, awaited]
        assert gathering.add(PLAIN, 0.03) == []


@given(
    st.lists(st.tuples(st.sampled_from((PLAIN, *AWAITED)), st.floats(0, 0.2)), min_size=1),
    st.floats(0, 0.1),
)
def test_all_are_reported_in_order_and_in_time(
    results: list[tuple[StepResult, float]], gather_s: float
) -> None:
    gathering, now_s, held_since_s = Gathering(gather_s), 10.0, 10.0
    told: list[int] = []
    for index, (result, pause_s) in enumerate(results):
        now_s += pause_s
        report = gathering.add(replace(result, step=index), now_s)
        told += [each.step for each in report]
        if report:
            held_since_s = now_s
        else:
            assert now_s - held_since_s <= gather_s
    last = gathering.add(replace(PLAIN, step=len(results), is_last=True), now_s)
    assert [*told, *(each.step for each in last)] == list(range(len(results) + 1))
