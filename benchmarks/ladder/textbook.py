"""The textbook example, and the law behind it: continuous beside static batching on the same
machine.

    python -m benchmarks.ladder.textbook [--save]

1. A batch of four with outputs of 10, 20, 50 and 100 tokens while others wait. The journal tells
who sat in which slot at every step; the plot (docs/images/textbook.svg) draws it for both policies.
2. A crowd with exponential output lengths over a batch of 8. A static batch takes as many steps as
its longest member, so the steps saved are E[max of 8 lengths] / E[length]; the measured gain in
tokens/s is set beside that law, which is computed from the very lengths that were served.

Both policies run interleaved (A B A B …), medians are reported. Lengths are forced, sampling is
greedy.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ladder import page
from benchmarks.ladder.ladder import law
from benchmarks.recording import record
from benchmarks.serving.stack import WHOLE_JOURNAL, Stack, journal_seq, seats_taken, serving
from kaiten.client import AsyncClient
from ledger import Ledger

TEXTBOOK_SLOTS = 4
TEXTBOOK_LENGTHS = (10, 20, 50, 100, 40, 30, 60, 20)
OPENER_TOKENS, APART_S = 400, 0.005
LAW_SLOTS = 8
LAW_REQUESTS = 768
LAW_LENGTH_MEAN, LAW_LENGTH_MAX = 48, 240
POLICIES = ("continuous", "static")
FLAG = {"continuous": "fcfs", "static": "static"}

Occupancy = list[list[int]]  # [step][slot], sequence id or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One crowd, served once."""

    tokens_per_s: float
    latency_mean_s: float
    latency_p99_s: float
    # Journal records written meanwhile: one per step that brought a token.
    steps: int


async def crowd(
    stack: Stack, lengths: Sequence[int], prompt_tokens: int, apart_s: float = 0.0
) -> Run:
    """Everybody asks at once, or in order with `apart_s` between; each gets exactly its length."""
    rng = random.Random(7)
    latencies: list[float] = []

    async def one(client: AsyncClient, index: int, length: int) -> None:
        await asyncio.sleep(index * apart_s)
        prompt = [rng.randrange(300, 1000) for _ in range(prompt_tokens)]
        async with client.generate(
            token_ids=prompt, max_tokens=length, min_tokens=length, ignore_eos=True, temperature=0
        ) as generation:
            async for _ in generation:
                pass
        latencies.append(time.perf_counter() - started)

    async with AsyncClient(stack.grpc) as client:
        seq = await journal_seq(stack)
        started = time.perf_counter()
        await asyncio.gather(*(one(client, *item) for item in enumerate(lengths)))
        wall_s = time.perf_counter() - started
    latencies.sort()
    return Run(
        tokens_per_s=sum(lengths) / wall_s,
        latency_mean_s=statistics.fmean(latencies),
        latency_p99_s=latencies[int(0.99 * (len(latencies) - 1))],
        steps=await journal_seq(stack) - seq,
    )


async def occupancy(stack: Stack, slots: int, from_seq: int) -> Occupancy:
    """Who computed in which slot at every step after a journal record, as the journal tells it."""
    ledger = await Ledger.connect(stack.store_url)
    records = await ledger.journal_read(from_seq, block_ms=1, count=10_000)
    await ledger.close()
    seats: dict[int, int] = {}
    plans: dict[int, tuple[Sequence[int], dict[int, int]]] = {}
    steps: Occupancy = []
    for journal_record in records:
        for told in journal_record.inputs:
            if told.HasField("plan"):
                joins = dict(zip(told.plan.join_slots, told.plan.admitted, strict=True))
                plans[told.plan.plan_id] = (told.plan.leave_slots, joins)
        for plan_id in sorted(p for p in plans if p <= journal_record.step.plan_id):
            leaves, joins = plans.pop(plan_id)
            for slot in leaves:
                seats.pop(slot, None)  # None: it was there before the first record read
            seats.update(joins)
        computed = set(journal_record.sequence_ids)
        steps.append([s if (s := seats.get(slot, 0)) in computed else 0 for slot in range(slots)])
    return steps


async def textbook(policy: str) -> tuple[Run, Occupancy]:
    """The example of the textbooks under one policy."""
    flags = ("--policy", FLAG[policy], "--slots", str(TEXTBOOK_SLOTS))
    with serving("", *flags, environ=WHOLE_JOURNAL) as stack:
        await crowd(stack, [4] * 4, 8)  # warm
        seq = await journal_seq(stack)
        # All eight are there, in order, before the first of them gets a seat. A static batch of
        # one keeps everybody waiting.
        openers = 1 if policy == "static" else TEXTBOOK_SLOTS
        async with seats_taken(stack, openers, OPENER_TOKENS):
            run = await crowd(stack, TEXTBOOK_LENGTHS, 8, APART_S)
        steps = await occupancy(stack, TEXTBOOK_SLOTS, seq)
    return run, without_opener(steps, openers)


def per_step(steps: Occupancy) -> float:
    return sum(TEXTBOOK_LENGTHS) / len(steps)


def without_opener(steps: Occupancy, openers: int) -> Occupancy:
    """From the first step of somebody else on."""
    sequence_ids = sorted({sequence_id for row in steps for sequence_id in row if sequence_id})
    crowd_from = sequence_ids[openers]
    rows = [
        [sequence_id if sequence_id >= crowd_from else 0 for sequence_id in row] for row in steps
    ]
    return rows[next(index for index, row in enumerate(rows) if any(row)) :]


def law_lengths() -> list[int]:
    rng = random.Random(0)
    draws = (rng.expovariate(1 / LAW_LENGTH_MEAN) for _ in range(LAW_REQUESTS))
    return [min(LAW_LENGTH_MAX, 1 + int(draw)) for draw in draws]


async def gain(repeats: int) -> dict[str, object]:
    """Continuous over static on the same lengths, interleaved, beside the law."""
    lengths = law_lengths()
    runs: dict[str, list[Run]] = {policy: [] for policy in POLICIES}
    for _ in range(repeats):
        for policy in POLICIES:
            flags = ("--policy", FLAG[policy], "--slots", str(LAW_SLOTS))
            with serving("", *flags) as stack:
                await crowd(stack, [8] * LAW_SLOTS, 16)  # warm
                runs[policy].append(await crowd(stack, lengths, 16))
    medians = {policy: _median(runs[policy]) for policy in POLICIES}
    measured = medians["continuous"].tokens_per_s / medians["static"].tokens_per_s
    steps = medians["static"].steps / medians["continuous"].steps
    expected = law(lengths, LAW_SLOTS)
    return {
        "slots": LAW_SLOTS,
        "requests": len(lengths),
        "output_tokens": sum(lengths),
        **{policy: _figures(medians[policy]) for policy in POLICIES},
        "gain": round(measured, 3),
        "law": round(expected, 3),
        "gain_over_law": round(measured / expected, 3),
        "gain_in_steps": round(steps, 3),
        "gain_in_steps_over_law": round(steps / expected, 3),
    }


def _median(runs: Sequence[Run]) -> Run:
    return Run(
        tokens_per_s=statistics.median(run.tokens_per_s for run in runs),
        latency_mean_s=statistics.median(run.latency_mean_s for run in runs),
        latency_p99_s=statistics.median(run.latency_p99_s for run in runs),
        steps=int(statistics.median(run.steps for run in runs)),
    )


def _figures(run: Run) -> dict[str, float]:
    return {
        "tokens_per_s": round(run.tokens_per_s, 1),
        "latency_mean_s": round(run.latency_mean_s, 3),
        "latency_p99_s": round(run.latency_p99_s, 3),
        "steps": run.steps,
    }


def draw(runs: dict[str, tuple[Run, Occupancy]], path: Path) -> None:
    """Slots over steps, one colour per request, white where a seat stands empty."""
    figure, axes = page.subplots(2, 1, figsize=(10, 4.2), sharex=True)
    from matplotlib import pyplot

    colours = pyplot.get_cmap("tab10")
    for axis, policy in zip(axes, POLICIES, strict=True):
        _, steps = runs[policy]
        lengths = Counter(sequence_id for row in steps for sequence_id in row)
        first = min(sequence_id for sequence_id in lengths if sequence_id)
        for slot in range(TEXTBOOK_SLOTS):
            for start, stop, sequence_id in _stretches([row[slot] for row in steps]):
                colour = colours((sequence_id - first) % 10)
                axis.barh(slot, stop - start, left=start, color=colour, edgecolor="none")
                axis.text(
                    (start + stop) / 2, slot, str(lengths[sequence_id]),
                    ha="center", va="center", fontsize=8, color="white",
                )  # fmt: skip
        axis.set_yticks(range(TEXTBOOK_SLOTS), [f"slot {slot}" for slot in range(TEXTBOOK_SLOTS)])
        axis.invert_yaxis()
        axis.set_title(
            f"{policy}: {len(steps)} steps, {per_step(steps):.2f} tokens per step",
            loc="left",
            fontsize=10,
        )
    axes[-1].set_xlabel("step (the number in a bar is the request's output length)")
    page.save(figure, path)


def _stretches(sequence_ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """[start, stop) of every request in one slot."""
    found: list[tuple[int, int, int]] = []
    for step, sequence_id in enumerate(sequence_ids):
        if not sequence_id:
            continue
        if found and found[-1][2] == sequence_id and found[-1][1] == step:
            found[-1] = (found[-1][0], step + 1, sequence_id)
        else:
            found.append((step, step + 1, sequence_id))
    return found


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="keep the results and the plot")
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    example = {policy: await textbook(policy) for policy in POLICIES}
    figures = {
        policy: {"steps": len(steps), "tokens_per_step": round(per_step(steps), 3)}
        for policy, (_, steps) in example.items()
    }
    record("textbook", {"lengths": TEXTBOOK_LENGTHS, **figures}, save=chosen.save)
    if chosen.save:
        draw(example, page.IMAGES / "textbook.svg")
    record("law", await gain(chosen.repeats), save=chosen.save)


if __name__ == "__main__":
    asyncio.run(main())
