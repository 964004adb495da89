"""What came of a run, in the words of the tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from benchmarks.modes.model import Run
from scheduler_svc.core.types import Request

MS = 1_000_000


def percentile(values: Sequence[int], permille: int) -> int:
    """The least that so many of a thousand do not exceed; 0 of nothing."""
    if not values:
        return 0
    return sorted(values)[max(0, -(-len(values) * permille // 1000) - 1)]


def ttfts_ns(run: Run, is_meant: Callable[[Request], bool] = lambda one: True) -> list[int]:
    """Of those whose first token came."""
    return [
        times[0] - run.by_id[sequence_id].arrived_ns
        for sequence_id, times in run.token_ns.items()
        if is_meant(run.by_id[sequence_id])
    ]


def gaps_ns(
    run: Run, is_meant: Callable[[Request], bool] = lambda one: True, since_ns: int = 0
) -> list[int]:
    """Between one token of a sequence and the next, from then on."""
    return [
        after - before
        for sequence_id, times in run.token_ns.items()
        if is_meant(run.by_id[sequence_id])
        for before, after in pairwise(times)
        if before >= since_ns
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run. Times in ms, of tokens as the scheduler hears of them."""

    ttft_p50: float
    ttft_p99: float
    gap_p50: float
    gap_p99: float
    # From the arrival to the last token.
    latency_mean: float
    # Of output, from the first arrival to the last token.
    tokens_per_s: float
    # What the worker computed for each token of output.
    busy_ms_per_token: float
    plans_per_step: float
    # Steps between two plans with which somebody joined.
    steps_per_admission: float
    preemptions: int
    wait_max: float
    # Of all prompt tokens, found in the cache when first admitted.
    cached: float


def figures_of(run: Run) -> Figures:
    """Of a run that was played to the end."""
    ttfts, gaps = ttfts_ns(run), gaps_ns(run)
    tokens = sum(map(len, run.token_ns.values()))
    ends = [times[-1] - run.by_id[one].arrived_ns for one, times in run.token_ns.items()]
    prompt = sum(over.num_prompt_tokens for over in run.overs.values())
    return Figures(
        ttft_p50=percentile(ttfts, 500) / MS,
        ttft_p99=percentile(ttfts, 990) / MS,
        gap_p50=percentile(gaps, 500) / MS,
        gap_p99=percentile(gaps, 990) / MS,
        latency_mean=sum(ends) / len(ends) / MS,
        tokens_per_s=tokens / (max(times[-1] for times in run.token_ns.values()) / 1e9),
        busy_ms_per_token=run.busy_ns / MS / tokens,
        plans_per_step=run.plans / run.steps,
        steps_per_admission=run.steps / run.admissions,
        preemptions=run.preemptions,
        wait_max=max(chain.from_iterable(run.waits_ns.values())) / MS,
        cached=sum(over.num_cached_tokens for over in run.overs.values()) / prompt,
    )
