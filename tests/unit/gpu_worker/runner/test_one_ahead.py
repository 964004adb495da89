"""A device that is a step ahead of the host says, result by result, what one in turns says."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.plans import RowSampling
from gpu_worker.batch.rows import Rows
from gpu_worker.batch.step_types import StepInputs
from gpu_worker.runner.dummy_steps import largest_step
from gpu_worker.runner.step_graphs import graph_sizes
from gpu_worker.runner.stepping import InTurns, OneAhead
from gpu_worker.runner.warm_up import warm_up
from kernels import dispatch
from tests.support.ahead import (
    LateScheduler,
    Model,
    ReplacingScheduler,
    SwappingScheduler,
    play,
    replay,
)
from tests.support.mini_scheduler import MiniScheduler, plan, sampling
from tests.support.random_model import write_random_model

LIMITS = RowLimits(
    slots=5,
    context_tokens=40,
    step_tokens=24,
    block_size=4,
    block_count=32,
    vocab_size=97,
    host_block_count=24,
)
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


@pytest.fixture(scope="module", autouse=True)
def reference_path() -> Iterator[None]:
    """Recorded steps have padding rows, which the compiled kernels of a CPU refuse."""
    dispatch.force("torch")
    yield
    dispatch.force(None)


@pytest.fixture(
    scope="module",
    params=[({}, False), (QWEN3, False), ({}, True)],
    ids=["llama", "qwen3", "fp8"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    changes, is_kv_fp8 = request.param
    return Model(write_random_model(folder, seed=3, **changes), LIMITS, is_kv_fp8=is_kv_fp8)


@st.composite
def params(draw: st.DrawFn) -> RowSampling:
    """Mostly plain; some with stops that come soon, log-probabilities, rules."""
    changes: dict[str, object] = {
        "max_tokens": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 99)),
    }
    if draw(st.booleans()):
        changes |= {"temperature": 0.9, "top_k": draw(st.integers(0, 20))}
    if draw(st.booleans()):
        width = draw(st.sampled_from([3, 10]))
        changes |= {
            "stop_token_ids": tuple(range(0, 97, width)),
            "min_tokens": draw(st.integers(0, 3)),
        }
    if draw(st.integers(0, 4)) == 0:
        changes |= {"logprobs": draw(st.integers(0, 3))}
    if draw(st.integers(0, 6)) == 0:
        changes |= {
            "repetition_penalty": 1.4,
            "bad_words": ((3,), (4, 5)),
            "logit_bias": ((7, 4.0),),
        }
    if draw(st.integers(0, 6)) == 0:
        changes |= {"prompt_logprobs": draw(st.integers(0, 2))}
    return sampling(**changes)


requests = st.lists(
    st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=20), params()),
    min_size=1,
    max_size=9,
)


@given(
    asked=requests,
    lease=st.integers(1, 6),
    chunk=st.sampled_from([3, 1000]),
    waits=st.booleans(),
    data=st.data(),
)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_same_plans_give_the_same_results(
    model: Model,
    asked: list[tuple[list[int], RowSampling]],
    lease: int,
    chunk: int,
    waits: bool,
    data: st.DataObject,
) -> None:
    scheduler = LateScheduler(LIMITS, chunk_tokens=chunk, lease_steps=lease, decodes_wait=waits)
    for prompt, wanted in asked:
        scheduler.submit(prompt, wanted)
    left = [4]

    def preempt_somebody() -> None:
        if left[0] and scheduler.running and data.draw(st.integers(0, 4)) == 0:
            left[0] -= 1
            scheduler.preempt(data.draw(st.sampled_from(sorted(scheduler.running))))

    played = play(
        model.in_turns(), scheduler, lambda: data.draw(st.integers(1, 8)), preempt_somebody
    )
    assert len(scheduler.reasons) == len(asked)
    replay(model.one_ahead(), played, lambda: data.draw(st.booleans()))


@given(asked=requests, lease=st.integers(1, 6), data=st.data())
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
def test_replaced_blocks_change_no_token(
    model: Model, asked: list[tuple[list[int], RowSampling]], lease: int, data: st.DataObject
) -> None:
    plain = LateScheduler(LIMITS, lease_steps=lease)
    replacing = ReplacingScheduler(LIMITS, lease_steps=lease)
    for prompt, wanted in asked:
        plain.submit(prompt, wanted)
        replacing.submit(prompt, wanted)
    cut = st.integers(1, 8)
    play(model.in_turns(), plain, lambda: data.draw(cut))
    played = play(model.in_turns(), replacing, lambda: data.draw(cut))
    assert replacing.outputs == plain.outputs
    assert replacing.reasons == plain.reasons
    replay(model.one_ahead(), played, lambda: data.draw(st.booleans()))


def test_who_is_swapped_out_and_in_goes_on_as_if_nothing_was(model: Model) -> None:
    plain = LateScheduler(LIMITS, lease_steps=2)
    swapping = SwappingScheduler(LIMITS, lease_steps=2)
    for scheduler in (plain, swapping):
        for index, length in enumerate((17, 9, 20, 13, 5, 16, 11)):
            prompt = [(11 * index + 3 * at) % 90 for at in range(length)]
            scheduler.submit(prompt, sampling(max_tokens=16, temperature=0.8, seed=index))
    turns = iter(range(1 << 30))

    def preempt_somebody() -> None:
        # Two at a time: one joins again with the very plan.
        if (turn := next(turns)) % 3 == 2 and swapping.running:
            for at in range(2):
                swapping.preempt(sorted(swapping.running)[(turn + at) % len(swapping.running)])

    play(model.in_turns(), plain, lambda: 8)
    played = play(model.in_turns(), swapping, lambda: 8, preempt_somebody)
    assert swapping.outputs == plain.outputs
    # Some prompt is not computed again, and some block is given away as it is swapped out.
    swaps = [item.plan.swaps for item in played]
    first = LIMITS.block_count
    assert sum(source >= first for each in swaps for source, _ in each) > 8
    assert any(
        {out for out, _ in each} & {into for _, into in each if into < first} for each in swaps
    )
    replay(model.one_ahead(), played, lambda: False)
    replay(model.one_ahead(), played, lambda: True)


def test_swaps_come_before_copies(model: Model) -> None:
    """A block may be copied that the same plan swaps in."""
    eager, ahead = model.turn_device(), model.resident()
    for stepper, pages, host_blocks in (
        (InTurns(Rows(LIMITS), eager), eager._pages, eager._host_blocks),
        (OneAhead(Rows(LIMITS), ahead), ahead._copies._pages, ahead._copies._host_blocks),
    ):
        assert host_blocks is not None
        host_blocks[3].fill_(7)
        swaps = ((LIMITS.block_count + 3, 0),)
        stepper.run(plan(1, swaps=swaps, copies=((0, 9),)), 0, lambda _: None, lambda: False)
        stepper.land()
        for block in (0, 9):
            assert torch.equal(pages[:, :, block], host_blocks[3])


def test_who_decodes_sits_out_while_there_are_prompts(model: Model) -> None:
    plain = LateScheduler(LIMITS, chunk_tokens=4, lease_steps=2)
    waiting = LateScheduler(LIMITS, chunk_tokens=4, lease_steps=2, decodes_wait=True)
    for scheduler in (plain, waiting):
        for length in (2, 17, 9, 13):
            scheduler.submit(range(length), sampling(max_tokens=9))
    play(model.in_turns(), plain, lambda: 8)
    played = play(model.in_turns(), waiting, lambda: 1)
    firsts = [dict(item.plan.chunks) for item in played]
    assert any({0, 4} <= set(chunks.values()) for chunks in firsts), "some sit out beside a chunk"
    for chunks, item in zip(firsts, played, strict=True):
        resting = {slot for slot, count in chunks.items() if not count}
        assert not resting & set(item.results[0].outcome.slots)
    assert waiting.outputs == plain.outputs
    replay(model.one_ahead(), played, lambda: True)


def test_blocks_are_replaced_indeed(model: Model) -> None:
    scheduler = ReplacingScheduler(LIMITS, lease_steps=2)
    for seed in range(4):
        scheduler.submit(range(10), sampling(max_tokens=12, seed=seed))
    played = play(model.in_turns(), scheduler, lambda: 8)
    replaced = [one for item in played for one in item.plan.replacements]
    assert len(replaced) > 8
    # What a row has given up is soon written by others.
    appended = {block for item in played[1:] for _, block, _ in item.plan.appends}
    assert appended & scheduler.given_up


def test_who_stopped_in_the_air_is_not_in_a_step_that_waited_for_it(model: Model) -> None:
    """The newcomer's bad words make the host read the older step first, which ended a row."""
    alone = LateScheduler(LIMITS, lease_steps=5)
    alone.submit([19, 18], sampling(max_tokens=5, temperature=0.9, seed=4))
    play(model.in_turns(), alone, lambda: 5)
    *before, last = alone.outputs[0]
    assert last not in before
    scheduler = LateScheduler(LIMITS, lease_steps=5)
    scheduler.submit(
        [19, 18], sampling(max_tokens=9, temperature=0.9, seed=4, stop_token_ids=(last,))
    )
    newcomers = iter([None, ([7], sampling(max_tokens=1, bad_words=((3,),)))])

    def submit_newcomer() -> None:
        if (newcomer := next(newcomers, None)) is not None:
            scheduler.submit(*newcomer)

    played = play(model.in_turns(), scheduler, lambda: 6, submit_newcomer)
    assert [len(item.results) for item in played] == [5, 1, 1]
    replay(model.one_ahead(), played, lambda: False)


def test_warming_up_leaves_no_row_and_writes_nowhere(model: Model) -> None:
    device = model.resident()
    kinds: list[tuple[int, int]] = []

    def compute(step: StepInputs) -> None:
        samples = device.launch(step).result()
        assert samples.is_there is not None
        assert not samples.is_there.any()
        kinds.append((step.row_count, step.token_count))

    warm_up(compute, LIMITS)
    assert kinds == [(1, 24), (2, 3), (4, 4), (4, 4), (4, 4)]
    assert not device.rows.state.is_live.any()
    assert not device.rows.state.num_tokens.any()


def test_the_largest_step_is_as_large_as_the_limits(model: Model) -> None:
    step = largest_step(LIMITS, context=LIMITS.context_tokens)
    assert (step.row_count, step.token_count) == (LIMITS.slots, LIMITS.step_tokens)
    assert step.tables().block_tables.shape == (1, LIMITS.slots, LIMITS.blocks_per_row)
    assert (step.context_lengths == LIMITS.context_tokens).all()
    assert (step.tables().slot_mapping == -1).all()
    assert len(model.turn_device().execute(step).token_ids) == LIMITS.slots


def test_recorded_sizes_hold_every_number_of_rows() -> None:
    for slots in (1, 2, 3, 7, 64, 65, 256, 1000):
        sizes = graph_sizes(slots)
        assert sizes[-1] == slots
        assert list(sizes) == sorted(set(sizes))
        # At worst half of a step is padding.
        assert all(larger <= 2 * size for size, larger in pairwise(sizes))
    assert graph_sizes(20) == (8, 16, 20)
    assert graph_sizes(3) == (3,)
    assert len(graph_sizes(256)) <= 40


def test_steps_say_whether_they_were_one_graph(model: Model) -> None:
    """One that wants what is not recorded is launched operator by operator; in turns all are."""
    told = []
    for stepper, wanted in (
        (model.one_ahead(), sampling(max_tokens=4)),
        (model.one_ahead(), sampling(max_tokens=4, prompt_logprobs=1)),
        (model.in_turns(), sampling(max_tokens=4)),
    ):
        scheduler = MiniScheduler(LIMITS, lease_steps=4)
        scheduler.submit([5, 6, 7], wanted)
        results = [one for item in play(stepper, scheduler, lambda: 9) for one in item.results]
        told.append([one.timings.is_graph for one in results if one.outcome.slots])
    assert told == [[True] * 4, [False, True, True, True], [False] * 4]
