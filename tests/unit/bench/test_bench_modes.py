"""What must hold of the ways of deciding, in virtual time: small versions of `benchmarks.modes`."""

import json
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.modes import claims, page
from benchmarks.modes.__main__ import run
from benchmarks.modes.costs import CPU, DEVICES
from benchmarks.modes.figures import figures_of, percentile, ttfts_ns
from benchmarks.modes.laws import LAWS, Job
from benchmarks.modes.ways import PROMISES, WAYS
from benchmarks.recording import RESULTS

FOUR = dict.fromkeys("abcd", 1)


@cache
def some_jobs(law: str, seed: int, count: int) -> tuple[Job, ...]:
    return LAWS[law].jobs(seed, CPU)[:count]


# The model


def test_a_step_takes_what_was_measured() -> None:
    """Of the ten cases, one by one; the smallest are dominated by what is done once per step."""
    lines = map(json.loads, (RESULTS / "step_profile.jsonl").read_text().splitlines())
    took = {
        one["case"]: one["parts_ms"]["step"]
        for one in lines
        if (one["commit"], one["threads"]) == ("3c811ec+", 2)
    }
    steps: dict[str, tuple[int, int, list[tuple[int, int]]]]
    steps = {f"{rows}x150": (rows, rows * 150, []) for rows in (1, 4, 8, 16, 32, 64)}
    steps |= {
        "16x1024": (16, 16 * 1024, []),
        "64x150 + chunk 448 at 0": (64, 64 * 150, [(448, 0)]),
        "chunk 512 at 0": (0, 0, [(512, 0)]),
        "chunk 512 at 512": (0, 0, [(512, 512)]),
    }
    assert took.keys() == steps.keys()
    ratios = {case: CPU.step(*step) / 1e6 / took[case] for case, step in steps.items()}
    assert all(0.85 < ratio < 1.35 for ratio in ratios.values()), ratios
    assert sum(0.9 < ratio < 1.1 for ratio in ratios.values()) >= 5, ratios


def test_the_same_numbers_come_out_again() -> None:
    jobs = LAWS["chat"].jobs(3, CPU)[:40]
    assert figures_of(claims.played(jobs, {})) == figures_of(claims.played(jobs, {}))
    assert LAWS["chat"].jobs(3, CPU)[:40] == jobs


def test_one_request_alone_takes_its_steps_and_two_messages() -> None:
    """600 tokens of prompt: a chunk of 512 and one of 88; then a token per step."""
    job = replace(LAWS["chat"].jobs(0, CPU)[0], output_tokens=5)
    request = replace(job.request, prompt=tuple(range(600)), arrived_ns=0)
    played = claims.played([Job(request, 5)], {})
    chunks = CPU.step(0, 0, [(512, 0)]) + CPU.step(0, 0, [(88, 512)])
    assert ttfts_ns(played) == [chunks + 2 * CPU.latency_ns]
    decodes = sum(CPU.step(1, 600 + index, []) for index in range(4))
    assert played.token_ns[1][-1] == chunks + decodes + 2 * CPU.latency_ns
    assert played.busy_ns == chunks + decodes


def test_the_least_that_so_many_do_not_exceed() -> None:
    values = list(range(100, 0, -1))
    assert [percentile(values, permille) for permille in (0, 10, 500, 990, 1000)] == [
        1, 1, 50, 99, 100,
    ]  # fmt: skip
    assert percentile([], 990) == 0


@pytest.mark.parametrize("way", WAYS)
def test_every_way_ends_every_request(way: str) -> None:
    """`Run.play` asserts that everything has ended."""
    jobs = some_jobs("prefix", 5, 12)
    played = claims.played(jobs, WAYS[way], spec=CPU.spec(slots=6, blocks=900))
    assert sum(map(len, played.token_ns.values())) == sum(job.output_tokens for job in jobs)


# The claims


def test_chunked_prefill_does_not_stall_decodes_and_prefill_first_answers_sooner() -> None:
    """Sarathi-Serve's claim, with a budget of one and a half quiet steps for `chunked`."""
    found = claims.stall_free()
    chunked, first = found["chunked"], found["prefill_first"]
    assert chunked["gap_p99"] <= 1.5 * chunked["quiet_gap_p99"]
    assert first["gap_p99"] >= 5 * first["quiet_gap_p99"]
    assert first["ttft_p50"] < 0.5 * chunked["ttft_p50"]
    assert first["ttft_p99"] < 0.5 * chunked["ttft_p99"]


def test_an_interval_saves_decisions_and_costs_first_tokens() -> None:
    """TGI's knobs."""
    found = claims.intervals(every=(1, 32), count=120)
    assert found["32"]["admissions"] < 0.7 * found["1"]["admissions"]
    assert found["32"]["plans"] < found["1"]["plans"]
    assert found["32"]["ttft_p50"] > 2 * found["1"]["ttft_p50"]


def test_equal_tenants_are_served_alike_whatever_they_ask() -> None:
    fair = claims.shares(FOUR, {}, seconds=40).values()
    assert max(fair) <= 1.1 * min(fair)
    fcfs = claims.shares(FOUR, {"order": "fcfs"}, seconds=40).values()
    assert max(fcfs) > 1.3 * min(fcfs), "or the crowd shows nothing"


def test_weights_are_kept_within_a_tenth() -> None:
    weights = {"a": 4, "b": 2, "c": 1, "d": 1}
    found = claims.shares(weights, {"tenant_weights": ["a=4", "b=2"]}, seconds=50)
    assert all(0.9 <= share <= 1.1 for share in found.values()), found


def test_a_flood_that_is_bounded_is_no_neighbours_problem() -> None:
    bounded = claims.neighbour({}, tokens_max=claims.EIGHTH, seeds=[0], count=20)
    assert bounded["times_p99"] <= 1.5
    fcfs = claims.neighbour({"order": "fcfs"}, seeds=[0], count=12)
    assert fcfs["times_p99"] > 20, "or the flood shows nothing"


def test_nobody_waits_longer_than_is_promised_where_a_slot_can_be_had() -> None:
    """The promise cannot make room: a slot's time more."""
    found = claims.longest_waits(max_wait_ms=3000)
    promised = found["shortest, promised"]
    assert found["shortest"]["wait_max"] > 5000, "or the crowd shows nothing"
    assert promised["wait_max"] <= 4000
    assert promised["overtakes"] == found["fcfs"]["overtakes"] == 0


def test_looking_at_the_prefix_finds_more_of_it() -> None:
    found = claims.prefixes(count=70)
    fcfs, one_long = found["fcfs"], found["prefix, one long at a time"]
    assert found["prefix"]["cached"] > fcfs["cached"]
    assert one_long["cached"] > 1.2 * fcfs["cached"]
    assert one_long["tokens_per_s"] > 1.03 * fcfs["tokens_per_s"]
    assert one_long["ttft_p50"] < 0.7 * fcfs["ttft_p50"]


@pytest.mark.parametrize("preset", PROMISES)
def test_a_preset_is_better_on_its_own_law_than_nothing(preset: str) -> None:
    """By the figure that it names, with a seed that nothing was tuned with."""
    law, metric = PROMISES[preset]
    # As many as show it.
    count = None if law == "writing" else 100
    ours, default = (run(law, knobs, 104, "cpu", count) for knobs in ({"preset": preset}, {}))
    if metric == "tokens_per_s":
        assert ours[metric] > 1.02 * default[metric]
    else:
        assert ours[metric] < 0.9 * default[metric]


# The page


def test_the_page_has_what_was_measured_last() -> None:
    assert page.written(page.PAGE.read_text()) == page.PAGE.read_text()
    assert page.last("cpu")["laws"].keys() == LAWS.keys()
    for device in DEVICES:
        assert page.last(device)["laws"]["chat"].keys() == WAYS.keys()
