"""Laws, traces and arrivals: the load is what its name says, and the same every time."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiten.bench.arrivals import ArrivalsError, due_times
from kaiten.bench.laws import LAWS, MOONCAKE_REUSE, reused_share
from kaiten.bench.options import BenchOptions, OptionsError, check
from kaiten.bench.plan import make_plan
from kaiten.bench.traces import TraceError, read_trace
from kaiten.bench.workload import BLOCK_TOKENS, Job, Shape, fill, limited, scaled

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,396,109
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:05.9799600,80,0
"""
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,Conversation log
118,ChatGPT,417,0,417,Conversation log
"""
MOONCAKE = [
    {"timestamp": 27000, "input_length": 6955, "output_length": 52, "hash_ids": [*range(14)]},
    {"timestamp": 30000, "input_length": 6472, "output_length": 26, "hash_ids": [*range(13)]},
]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def jobs(count: int) -> list[Job]:
    return [Job(index=index, prompt=(7,), output_tokens=1) for index in range(count)]


def test_the_ragged_crowd_is_the_published_one() -> None:
    plan = make_plan(BenchOptions())
    assert len(plan.jobs) == 64
    assert (plan.prompt_tokens, plan.output_tokens) == (5456, 3911)
    # The first request as the law was first written: lengths first, then tokens, one generator.
    drawn = rng(1234)
    low, high = math.log(8), math.log(257)
    prompts, outputs = (np.exp(drawn.uniform(low, high, 64)).astype(int) for _ in range(2))
    first = drawn.integers(300, 32_000, int(prompts[0])).tolist()
    assert list(plan.jobs[0].prompt) == first
    assert plan.jobs[0].output_tokens == outputs[0]


@pytest.mark.parametrize("name", LAWS)
def test_a_law_gives_the_same_jobs_every_time_and_legal_ones(name: str) -> None:
    options = BenchOptions(workload=name, count=20)
    first, again = make_plan(options), make_plan(options)
    assert first == again
    assert len(first.jobs) == 20
    for job in first.jobs:
        assert job.prompt
        assert job.output_tokens >= 1
        assert all(300 <= token < 32_000 for token in job.prompt[:50])


def test_exponential_outputs_are_capped_and_the_mean_is_known() -> None:
    for cap in (32, 128, 512, 1536):
        shapes = LAWS[f"exponential-{cap}"].draw(rng(), 20_000)
        outputs = [shape.output_tokens for shape in shapes]
        assert max(outputs) == cap or cap == 1536
        assert {shape.prompt_tokens for shape in shapes} == {512}
        # E[min(X, cap)] of an exponential is mean * (1 - exp(-cap / mean)); cut to whole tokens.
        expected = 128 * (1 - math.exp(-cap / 128)) - 0.5
        assert np.mean(outputs) == pytest.approx(expected, abs=4)


@pytest.mark.parametrize(
    ("name", "prompt_p50", "output_p50", "output_p90"),
    [("azure-conversation", 757, 151, 455), ("azure-code", 1466, 13, 63)],
)
def test_azure_laws_have_their_percentiles(
    name: str, prompt_p50: int, output_p50: int, output_p90: int
) -> None:
    shapes = LAWS[name].draw(rng(), 20_000)
    assert np.median([s.prompt_tokens for s in shapes]) == pytest.approx(prompt_p50, rel=0.05)
    outputs = [s.output_tokens for s in shapes]
    assert np.median(outputs) == pytest.approx(output_p50, rel=0.08)
    assert np.percentile(outputs, 90) == pytest.approx(output_p90, rel=0.05)


def test_mooncake_shares_a_third_of_its_blocks_and_equal_blocks_are_equal_tokens() -> None:
    shapes = LAWS["mooncake"].draw(rng(), 400)
    assert reused_share(shapes) == pytest.approx(MOONCAKE_REUSE, abs=0.02)
    made = fill([scaled(shape, 1 / 64) for shape in shapes], rng(), 32_000)
    tall = BLOCK_TOKENS // 64
    tokens: dict[int, tuple[int, ...]] = {}
    for shape, job in zip(shapes, made, strict=True):
        for index, block in enumerate(shape.blocks[:-1]):
            piece = job.prompt[index * tall : (index + 1) * tall]
            assert tokens.setdefault(block, piece) == piece
    assert len(set(tokens.values())) == len(tokens), "different blocks, different tokens"


@given(
    prompt=st.integers(1, 5000),
    output=st.integers(1, 5000),
    factor=st.floats(0.001, 2),
    context=st.integers(2, 3000),
    is_shared=st.booleans(),
)
def test_scaling_and_limiting_keep_shapes_legal(
    prompt: int, output: int, factor: float, context: int, is_shared: bool
) -> None:
    blocks = tuple(range(-(-prompt // BLOCK_TOKENS))) if is_shared else ()
    shape = Shape(prompt_tokens=prompt, output_tokens=output, blocks=blocks)
    small = limited(scaled(shape, factor), context)
    assert small.prompt_tokens + small.output_tokens <= context
    (job,) = fill([small], rng(), 1000)
    assert len(job.prompt) == small.prompt_tokens
    assert limited(shape, 10_001) == shape or output > 5000


def test_traces_are_told_apart_sorted_and_start_at_zero() -> None:
    azure = read_trace(AZURE.splitlines(), 0, rng())
    assert [(s.prompt_tokens, s.output_tokens) for s in azure] == [(4808, 10), (396, 109)]
    assert azure[0].due_s == 0
    assert azure[1].due_s == pytest.approx(0.052)
    burst = read_trace(BURSTGPT.splitlines(), 0, rng())
    assert [s.due_s for s in burst] == [0, 40.5]
    assert read_trace(BURSTGPT.splitlines(), 1, rng()) == burst[:1]
    moon = read_trace(map(json.dumps, MOONCAKE), 0, rng())
    assert reused_share(moon) == pytest.approx(13 / 27)
    assert all(0 <= (s.due_s or 0) < 6 for s in moon)
    assert sum(len(s.blocks) * BLOCK_TOKENS >= s.prompt_tokens for s in moon) == 2


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["a,b,c", "1,2,3"],
        ["TIMESTAMP,ContextTokens,GeneratedTokens"],
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "today,1,1"],
        ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:04,many,1"],
        ['{"hash_ids": [1]}'],
    ],
)
def test_what_is_no_trace_is_refused(lines: Sequence[str]) -> None:
    with pytest.raises(TraceError):
        read_trace(lines, 0, rng())


@pytest.mark.parametrize("text", ["at-once", "fixed:8", "poisson:8", "gamma:8:3"])
@given(count=st.integers(0, 300), seed=st.integers(0, 99))
def test_arrivals_start_at_zero_and_never_go_back(text: str, count: int, seed: int) -> None:
    due = due_times(text, jobs(count), rng(seed))
    assert len(due) == count
    assert list(due) == sorted(due)
    assert not due or due[0] == 0


def test_arrivals_have_their_rate_and_their_burstiness() -> None:
    for text, cv in (("fixed:50", 0.0), ("poisson:50", 1.0), ("gamma:50:3", 3.0)):
        gaps = np.diff(due_times(text, jobs(20_000), rng()))
        assert 1 / gaps.mean() == pytest.approx(50, rel=0.08)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.08, abs=1e-9)


def test_a_trace_can_be_played_faster() -> None:
    told = [Job(index=i, prompt=(7,), output_tokens=1, due_s=float(i)) for i in range(3)]
    assert due_times("trace", told, rng()) == (0, 1, 2)
    assert due_times("trace:4", told, rng()) == (0, 0.25, 0.5)
    with pytest.raises(ArrivalsError, match="trace file"):
        due_times("trace", jobs(2), rng())


@pytest.mark.parametrize(
    "text", ["", "often", "fixed", "fixed:0", "fixed:-1", "fixed:x", "poisson:nan", "gamma:1"]
)
def test_unknown_arrivals_say_what_is_known(text: str) -> None:
    with pytest.raises(ArrivalsError, match="at-once, fixed:RATE"):
        due_times(text, jobs(2), rng())


@pytest.mark.parametrize(
    "options",
    [
        BenchOptions(count=0),
        BenchOptions(scale=-1),
        BenchOptions(scale=math.nan),
        BenchOptions(report=Path("/no/such/folder/report.html")),
        BenchOptions(jsonl=Path("/")),
        BenchOptions(warmup=-1),
        BenchOptions(concurrency=4, arrivals="poisson:1"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(options: BenchOptions) -> None:
    with pytest.raises(OptionsError):
        check(options)


def test_a_plan_names_what_it_does_not_know() -> None:
    with pytest.raises(OptionsError, match="ragged"):
        make_plan(BenchOptions(workload="no-such-thing"))
    with pytest.raises(OptionsError, match="--arrivals"):
        make_plan(BenchOptions(arrivals="often"))


def test_a_plan_fits_the_model_and_says_how_many_it_cut() -> None:
    plan = make_plan(BenchOptions(workload="uniform"), vocab_size=400, context_tokens=600)
    assert plan.shortened > 100
    assert all(len(job.prompt) + job.output_tokens <= 600 for job in plan.jobs)
    assert all(token < 400 for job in plan.jobs for token in job.prompt)
    assert plan.due == (0.0,) * 256
    assert make_plan(BenchOptions(concurrency=3)).due is None
