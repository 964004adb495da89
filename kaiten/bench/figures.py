"""Outcomes in numbers. Pure; the same outcomes in any order give the same figures."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kaiten.bench.outcomes import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a set of numbers; all zero when there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a user would call good. None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    latency_s: float | None = None

    def is_met_by(self, outcome: Outcome) -> bool:
        """Failed requests never meet it."""
        if not outcome.is_ok or not outcome.frames:
            return False
        found = (outcome.ttft_s, outcome.tpot_s, outcome.latency_s)
        wanted = (self.ttft_s, self.tpot_s, self.latency_s)
        return all(limit is None or got <= limit for got, limit in zip(found, wanted, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run. Throughput counts tokens of requests that ended well, over the whole run."""

    requests: int
    requests_ok: int
    wall_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    # Ended well, but with another number of tokens than was asked for.
    wrong_length: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    requests_per_s: float
    ttft_s: Spread
    latency_s: Spread
    # Between two frames of a stream, however many tokens each brings: the pauses a reader sees.
    inter_frame_s: Spread
    # The same time shared out over the tokens of the later frame.
    inter_token_s: Spread
    tpot_s: Spread
    # How late the client sent. When this is not small, the client was the bottleneck.
    send_late_s: Spread
    goodput_share: float
    goodput_requests_per_s: float
    errors: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Rounded to what a measurement can mean."""
        return {key: _rounded(value) for key, value in asdict(self).items()}


def spread(numbers: Iterable[float]) -> Spread:
    values = list(numbers)
    if not values:
        return Spread(count=0, mean=0.0, p50=0.0, p90=0.0, p99=0.0, max=0.0)
    p50, p90, p99 = np.quantile(values, (0.5, 0.9, 0.99)).tolist()
    # Exact, so in any order the same.
    mean = math.fsum(values) / len(values)
    return Spread(count=len(values), mean=mean, p50=p50, p90=p90, p99=p99, max=max(values))


def frame_gaps_s(outcome: Outcome) -> list[float]:
    return [b.at_s - a.at_s for a, b in zip(outcome.frames, outcome.frames[1:], strict=False)]


def token_gaps_s(outcome: Outcome) -> list[float]:
    """One per token after the first frame."""
    gaps: list[float] = []
    for gap_s, frame in zip(frame_gaps_s(outcome), outcome.frames[1:], strict=True):
        gaps += [gap_s / frame.tokens] * frame.tokens
    return gaps


def figures_of(outcomes: Sequence[Outcome], target: Target | None = None) -> Figures:
    """The whole run, from the first due time to the last end."""
    ok = [outcome for outcome in outcomes if outcome.is_ok]
    started_s = min((outcome.due_s for outcome in outcomes), default=0.0)
    wall_s = max((outcome.done_s for outcome in outcomes), default=0.0) - started_s
    per_s = 1 / wall_s if wall_s > 0 else 0.0
    output_tokens = sum(outcome.output_tokens for outcome in ok)
    prompt_tokens = sum(outcome.prompt_tokens for outcome in ok)
    good = sum((target or Target()).is_met_by(outcome) for outcome in outcomes)
    streamed = [outcome for outcome in ok if outcome.frames]
    return Figures(
        requests=len(outcomes),
        requests_ok=len(ok),
        wall_s=wall_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(outcome.cached_tokens for outcome in ok),
        output_tokens=output_tokens,
        wrong_length=sum(each.output_tokens != each.output_tokens_asked for each in ok),
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(output_tokens + prompt_tokens) * per_s,
        requests_per_s=len(ok) * per_s,
        ttft_s=spread(outcome.ttft_s for outcome in streamed),
        latency_s=spread(outcome.latency_s for outcome in ok),
        inter_frame_s=spread(gap for outcome in ok for gap in frame_gaps_s(outcome)),
        inter_token_s=spread(gap for outcome in ok for gap in token_gaps_s(outcome)),
        tpot_s=spread(outcome.tpot_s for outcome in streamed if outcome.output_tokens > 1),
        send_late_s=spread(outcome.sent_s - outcome.due_s for outcome in outcomes),
        goodput_share=good / len(outcomes) if outcomes else 0.0,
        goodput_requests_per_s=good * per_s,
        errors=dict(sorted(Counter(each.error for each in outcomes if each.error).items())),
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return value
