"""What the articles claim, and what is promised: each shown on a crowd made for it.

tests/unit/bench/test_bench_modes.py says what must be true of the figures.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from benchmarks.modes.costs import CPU, Costs
from benchmarks.modes.figures import MS, figures_of, gaps_ns, percentile, ttfts_ns
from benchmarks.modes.laws import LAWS, QUIET, Job, flooded, numbered
from benchmarks.modes.model import Run
from benchmarks.modes.ways import Knobs, configured
from scheduler_svc.core.types import WorkerSpec

STREAM: Final = "stream"
READER: Final = "reader"
# Since when prompts come.
LOADED_NS: Final = 10_000_000_000
# Of the KV pool.
EIGHTH: Final = CPU.blocks * 16 // 8


def played(
    jobs: Sequence[Job],
    knobs: Knobs,
    costs: Costs = CPU,
    spec: WorkerSpec | None = None,
    until_ns: int | None = None,
    until_answered: str | None = None,
) -> Run:
    """On the CPU worker, unless it is said otherwise."""
    spec = spec or costs.spec()
    return Run(costs, spec, configured(knobs), jobs, until_ns, until_answered).play()


# Sarathi-Serve: stall-free batching


def streams_and_readers(readers: int) -> tuple[Job, ...]:
    """24 streams of 800 tokens, and so many prompts of 500 tokens that come while they run."""
    rng = random.Random(0)
    own = itertools.count()
    times = sorted(rng.randrange(LOADED_NS, 3 * LOADED_NS) for _ in range(readers))
    return numbered(
        [(0, (next(own), *range(400)), 800, 800, STREAM) for _ in range(24)]
        + [(at_ns, (next(own), *range(500)), 2, 2, READER) for at_ns in times]
    )


def stall_free(readers: int = 20) -> dict[str, dict[str, float]]:
    """By mix: gaps of the streams without and with prompts beside them, and these prompts' first
    tokens, in ms. `chunked` has a budget of one and a half quiet steps.
    """
    quiet_ns = CPU.step(24, 0, [])
    specs = {
        "chunked": CPU.spec(slots=26, mixed_ns=quiet_ns * 14 // 10),
        "merged_prefill": CPU.spec(slots=26),
        "prefill_first": CPU.spec(slots=26),
    }
    found = {}
    for mix, spec in specs.items():
        gaps = {}
        for name, count in {"quiet": 0, "loaded": readers}.items():
            run = played(streams_and_readers(count), {"mix": mix}, spec=spec)
            gaps[name] = gaps_ns(run, lambda one: one.tenant == STREAM, since_ns=LOADED_NS)
        ttfts = ttfts_ns(run, lambda one: one.tenant == READER)
        found[mix] = {
            "quiet_gap_p99": percentile(gaps["quiet"], 990) / MS,
            "gap_p99": percentile(gaps["loaded"], 990) / MS,
            "gap_max": max(gaps["loaded"]) / MS,
            "ttft_p50": percentile(ttfts, 500) / MS,
            "ttft_p99": percentile(ttfts, 990) / MS,
        }
    return found


# Fair queueing


def crowd_of(weights: Mapping[str, int], each: int = 60) -> tuple[Job, ...]:
    """Everybody has so much waiting that nobody runs out, in shapes of their own: one reads, the
    next writes.
    """
    rng = random.Random(1)
    shapes = itertools.cycle([(900, 30), (60, 120), (300, 60), (30, 200)])
    lengths = [
        (rng.randint(prompt // 2, prompt * 3 // 2), rng.randint(output // 2, output * 3 // 2), name)
        for (name, weight), (prompt, output) in zip(weights.items(), shapes, strict=False)
        for _ in range(each * weight * 960 // (prompt + output))
    ]
    rng.shuffle(lengths)
    return numbered(
        (0, (index, *range(1, prompt)), output, output, name)
        for index, (prompt, output, name) in enumerate(lengths)
    )


def shares(weights: Mapping[str, int], knobs: Knobs, seconds: int = 60) -> dict[str, float]:
    """Tokens served per weight by tenant, of their mean, while all have requests waiting."""
    run = played(crowd_of(weights), knobs, until_ns=seconds * 1_000_000_000)
    waiting = {sequence.live.request.tenant for sequence in run.core.waiting}
    assert waiting == set(weights), f"only {waiting} still wait"
    by_weight = {tenant: run.served[tenant] / weight for tenant, weight in weights.items()}
    mean = sum(by_weight.values()) / len(by_weight)
    return {tenant: served / mean for tenant, served in by_weight.items()}


def neighbour(
    knobs: Knobs,
    *,
    tokens_max: int | None = None,
    seeds: Sequence[int] = (0, 1, 2),
    count: int = 100,
) -> dict[str, float]:
    """Of a quiet tenant, beside a flood that may have so many tokens running, and alone: p50 and
    p99 to the first token, in ms.
    """
    found = {}
    for name, is_flooded in {"flooded": True, "alone": False}.items():
        ttfts = []
        for seed in seeds:
            jobs = flooded(seed, CPU, count=count, is_flooded=is_flooded, tokens_max=tokens_max)
            run = played(jobs, knobs, until_answered=QUIET)
            ttfts += ttfts_ns(run, lambda one: one.tenant == QUIET)
        found[f"{name}_ttft_p50"] = percentile(ttfts, 500) / MS
        found[f"{name}_ttft_p99"] = percentile(ttfts, 990) / MS
    found["times_p99"] = found["flooded_ttft_p99"] / found["alone_ttft_p99"]
    return found


# A longest wait


def shorts_and_longs(seconds: int = 60) -> tuple[Job, ...]:
    """As many short requests as eight slots can do, and a long one now and then."""
    rng = random.Random(2)
    own = itertools.count()
    rows = []
    for at_ms in range(0, seconds * 1000, 120):
        is_long = at_ms % 7200 == 3600
        prompt, output = (3000, 20) if is_long else (rng.randint(60, 140), rng.randint(20, 60))
        tenant = READER if is_long else STREAM
        rows.append((at_ms * MS, (next(own), *range(1, prompt)), output, output, tenant))
    return numbered(rows)


def longest_waits(max_wait_ms: int = 3000) -> dict[str, dict[str, float]]:
    """By order: the longest wait of anybody in ms, and joins past somebody who had waited longer
    than is promised.
    """
    shortest: Knobs = {"order": "shortest", "token_worth_ms": 50}
    ways: dict[str, Knobs] = {
        "fcfs": {"order": "fcfs", "max_wait_ms": max_wait_ms},
        "shortest": shortest,
        "shortest, promised": {**shortest, "max_wait_ms": max_wait_ms},
    }
    found = {}
    for name, knobs in ways.items():
        run = played(shorts_and_longs(), knobs, spec=CPU.spec(slots=8))
        found[name] = {"wait_max": figures_of(run).wait_max, "overtakes": float(run.overtakes)}
    return found


# Cadence


def intervals(
    every: Sequence[int] = (1, 4, 8, 16, 32), seed: int = 0, count: int = LAWS["writing"].count
) -> dict[str, dict[str, float]]:
    """By steps between two looks at the queue, prompts first: how often decodes are held up and
    plans are made, per 100 steps, and the first tokens, in ms.
    """
    jobs = replace(LAWS["writing"], count=count).jobs(seed, CPU)
    found = {}
    for steps in every:
        knobs = {"mix": "prefill_first", "cadence": "interval", "schedule_interval_steps": steps}
        one = figures_of(played(jobs, knobs))
        found[str(steps)] = {
            "admissions": 100 / one.steps_per_admission,
            "plans": 100 * one.plans_per_step,
            "ttft_p50": one.ttft_p50,
            "ttft_p99": one.ttft_p99,
            "gap_p99": one.gap_p99,
        }
    return found


# Longest prefix match


def prefixes(seed: int = 0, count: int = LAWS["prefix"].count) -> dict[str, dict[str, float]]:
    """By order, where 37 % of prompts are somebody's before: what was found in the cache of all
    prompt tokens, throughput, and first tokens in ms.
    """
    jobs = replace(LAWS["prefix"], count=count).jobs(seed, CPU)
    ways: dict[str, Knobs] = {
        "fcfs": {"order": "fcfs"},
        "prefix": {"order": "prefix"},
        "prefix, one long at a time": {
            "order": "prefix",
            "long_prefill_tokens": 1024,
            "long_prefills_max": 1,
        },
    }
    found = {}
    for name, knobs in ways.items():
        one = figures_of(played(jobs, knobs))
        found[name] = {
            "cached": one.cached,
            "tokens_per_s": one.tokens_per_s,
            "ttft_p50": one.ttft_p50,
        }
    return found
