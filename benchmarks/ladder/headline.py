"""Static to continuous at a load where static batching saturates: the table everybody quotes.

    python -m benchmarks.ladder.headline [--repeats 2] [--requests 800] [--save]

One stack serves the shipped model with 32 seats. First a crowd at once tells its capacity; then
requests arrive at random at 0.9 of that, by one schedule for both ways, in turns:

continuous    every request goes to the stack when it is due
static        the same stack in batches of fixed shape (`static_batches`), as many seats

Throughput counts the tokens that were wanted and came until the last request was seated. Latency
counts from the due time; a saturated queue grows as long as the load lasts, so static latencies say
how far behind it is, not how slow it is. With --save table and plot of docs/continuous-batching.md
follow.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from benchmarks.ladder import page
from benchmarks.ladder.ladder import law
from benchmarks.ladder.static_batches import StaticBatches
from benchmarks.recording import record
from benchmarks.serving.stack import serving
from kaiten.bench.arrivals import due_times
from kaiten.bench.charts import distribution, in_flight
from kaiten.bench.figures import figures_of
from kaiten.bench.laws import LAWS
from kaiten.bench.outcomes import Outcome
from kaiten.bench.runner import Load
from kaiten.bench.targets import GrpcTarget, Target
from kaiten.bench.workload import Job, fill, scaled

SEATS, KV_MEMORY_MB = 32, 32
PROMPT_TOKENS, OUTPUT_TOKENS_MAX = 16, 384
VOCAB_SIZE = 1500
LOAD_SHARE = 0.9
# What issue and textbooks promise: 1200 -> 3600 tok/s, 2.5 -> 1.2 s, 8.0 -> 2.5 s.
GOALS = {"tokens_per_s": 3.0, "latency_mean_s": 0.48, "latency_p99_s": 0.31}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of batching at one load; medians over the rounds."""

    tokens_per_s: float
    latency_mean_s: float
    latency_p99_s: float
    ttft_mean_s: float


def jobs_of(requests: int) -> tuple[Job, ...]:
    """Exponential outputs of mean 64."""
    rng = np.random.default_rng(11)
    shapes = [scaled(shape, 0.5) for shape in LAWS["exponential-1536"].draw(rng, requests)]
    cut = [
        replace(
            shape,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=min(shape.output_tokens, OUTPUT_TOKENS_MAX),
        )
        for shape in shapes
    ]
    return fill(cut, rng, VOCAB_SIZE)


def seated_rate(outcomes: Sequence[Outcome]) -> float:
    """Tokens per second until the last request had its first one: the end, when seats stand empty
    whatever one does, does not count."""
    last_s = max(outcome.frames[0].at_s for outcome in outcomes)
    frames = (frame for outcome in outcomes for frame in outcome.frames)
    return sum(frame.tokens for frame in frames if frame.at_s <= last_s) / last_s


async def run(target: Target, jobs: Sequence[Job], due: Sequence[float]) -> list[Outcome]:
    outcomes = await Load(target, timeout_s=600.0).open_loop(jobs, due)
    figures = figures_of(outcomes)
    assert figures.requests_ok == len(jobs), figures.errors
    assert not figures.wrong_length
    return outcomes


async def rounds_of(
    address: str, requests: int, repeats: int
) -> tuple[float, Sequence[float], dict[str, list[list[Outcome]]]]:
    """The capacity, the schedule, and what came of it, round by round."""
    jobs = jobs_of(requests)
    target = GrpcTarget(address)
    ways: dict[str, Target] = {"static": StaticBatches(target, SEATS), "continuous": target}
    await target.prepare()
    crowd = jobs[: SEATS * 8]
    await run(target, crowd[:SEATS], [0.0] * SEATS)  # warm
    tokens_per_s = seated_rate(await run(target, crowd, [0.0] * len(crowd)))
    mean_tokens = fmean(job.output_tokens for job in jobs)
    rate = LOAD_SHARE * tokens_per_s / mean_tokens
    due = due_times(f"poisson:{rate}", jobs, np.random.default_rng(5))
    found: dict[str, list[list[Outcome]]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(await run(way, jobs, due))
            print(f"{name:12} {seated_rate(found[name][-1]):8.0f} tok/s", flush=True)
    await ways["static"].close()
    return tokens_per_s, due, found


def way_of(rounds: Sequence[Sequence[Outcome]]) -> Way:
    figures = [figures_of(outcomes) for outcomes in rounds]
    return Way(
        tokens_per_s=median(seated_rate(outcomes) for outcomes in rounds),
        latency_mean_s=median(each.latency_s.mean for each in figures),
        latency_p99_s=median(each.latency_s.p99 for each in figures),
        ttft_mean_s=median(each.ttft_s.mean for each in figures),
    )


def table(ways: Mapping[str, Way], expected: float, load_s: float) -> str:
    """Markdown, with the goals beside what was found."""
    static, continuous = ways["static"], ways["continuous"]
    rows = (
        ("throughput", "tok/s", "tokens_per_s", "{:.0f}"),
        ("latency mean", "s", "latency_mean_s", "{:.2f}"),
        ("latency p99", "s", "latency_p99_s", "{:.2f}"),
        ("TTFT mean", "s", "ttft_mean_s", "{:.2f}"),
    )
    lines = ["| | static | continuous | ratio | goal |", "|---|---|---|---|---|"]
    for label, unit, key, form in rows:
        before, after = getattr(static, key), getattr(continuous, key)
        sign = "≥" if key == "tokens_per_s" else "≤"
        goal = f"{sign} {GOALS[key]:g} ×" if key in GOALS else ""
        cells = f"{form.format(before)} {unit} | {form.format(after)} {unit}"
        lines.append(f"| {label} | {cells} | {after / before:.2f} × | {goal} |")
    gain = continuous.tokens_per_s / static.tokens_per_s
    lines += [
        "",
        f"The law for these lengths and {SEATS} seats allows {expected:.2f} ×, when the load is"
        f" without end; at {LOAD_SHARE:g} of capacity {LOAD_SHARE * expected:.2f} × can show, and"
        f" {gain:.2f} × did. The load lasted {load_s:.0f} s.",
    ]
    return "\n".join(lines)


def draw(found: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Who is due and not done, over time; and the distribution of latencies."""
    figure, axes = page.subplots(1, 2, figsize=(10, 3.6))
    for (name, outcomes), colour in zip(found.items(), ("#d55e00", "#0072b2"), strict=True):
        points = in_flight(outcomes)
        axes[0].plot(*zip(*points, strict=True), color=colour, label=name, linewidth=1.4)
        shares = distribution(outcome.latency_s for outcome in outcomes)
        axes[1].plot(*zip(*shares, strict=True), color=colour, label=name, linewidth=1.8)
    axes[0].axvline(max(o.due_s for o in next(iter(found.values()))), color="#9aa5b1", lw=1)
    axes[0].set_title("requests due and not done (the load ends at the line)", loc="left", size=10)
    axes[0].set_xlabel("seconds")
    axes[1].set_title("share of requests done within", loc="left", size=10)
    axes[1].set_xlabel("latency in s")
    axes[1].legend(frameon=False)
    for axis in axes:
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    page.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--requests", type=int, default=800)
    parser.add_argument("--save", action="store_true", help="keep results, plot and table")
    chosen = parser.parse_args()
    if chosen.requests < SEATS:
        parser.error(f"--requests must be at least the {SEATS} seats, got {chosen.requests}")
    with serving("", "--slots", str(SEATS), "--kv-memory-mb", str(KV_MEMORY_MB)) as stack:
        most, due, found = asyncio.run(rounds_of(stack.grpc, chosen.requests, chosen.repeats))
    ways = {name: way_of(rounds) for name, rounds in found.items()}
    expected = law([job.output_tokens for job in jobs_of(chosen.requests)], SEATS)
    figures = {
        "seats": SEATS,
        "requests": chosen.requests,
        "repeats": chosen.repeats,
        "load_share": LOAD_SHARE,
        "load_s": round(due[-1], 2),
        "capacity_tokens_per_s": round(most, 1),
        "law": round(expected, 3),
        "ways": {name: asdict(way) for name, way in ways.items()},
    }
    record("headline", figures, save=chosen.save)
    text = table(ways, expected, due[-1])
    print(text)
    if chosen.save:
        first = {name: rounds[0] for name, rounds in found.items()}
        draw(first, page.IMAGES / "headline.svg")
        page.write_table("headline", text)


if __name__ == "__main__":
    main()
