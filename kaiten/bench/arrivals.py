"""When requests are due. An open loop fixes this before the first one is sent.

Written `at-once`, `fixed:RATE`, `poisson:RATE`, `gamma:RATE:CV` or `trace[:SPEED]`; rates are per
second.
"""

import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from kaiten.bench.workload import Job

Times = tuple[float, ...]


class ArrivalsError(ValueError):
    """The text says no arrivals; the message says what it may be."""


def due_times(text: str, jobs: Sequence[Job], rng: np.random.Generator) -> Times:
    """Seconds from the start, ascending, one per job."""
    kind, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        raise ArrivalsError(f"{text!r}: {_rule(kind)}") from None
    arity = ARITIES.get(kind)
    if arity is None or len(values) not in arity or any(not 0 < v < 1e9 for v in values):
        raise ArrivalsError(f"{text!r}: {_rule(kind)}")
    if kind == "at-once":
        return (0.0,) * len(jobs)
    if kind == "trace":
        return _as_traced(jobs, values[0] if values else 1.0)
    return _accumulated(_gaps(kind, values, rng, len(jobs)))


def _gaps(
    kind: str, values: Sequence[float], rng: np.random.Generator, count: int
) -> Sequence[float]:
    mean_s = 1 / values[0]
    if kind == "fixed":
        return [mean_s] * count
    # A gamma law of shape 1 is the exponential one of Poisson arrivals.
    shape = 1 / values[1] ** 2 if kind == "gamma" else 1.0
    drawn: list[float] = rng.gamma(shape, mean_s / shape, count).tolist()
    return drawn


def _accumulated(gaps: Sequence[float]) -> Times:
    """The first is due at once."""
    return tuple(itertools.accumulate(gaps[:-1], initial=0.0)) if gaps else ()


def _as_traced(jobs: Sequence[Job], speed: float) -> Times:
    due = [job.due_s for job in jobs]
    if any(due_s is None for due_s in due):
        raise ArrivalsError("'trace' needs a trace file: a law of length has no arrivals")
    return tuple((due_s or 0.0) / speed for due_s in due)


def _rule(kind: str) -> str:
    known = "at-once, fixed:RATE, poisson:RATE, gamma:RATE:CV, trace or trace:SPEED"
    return f"{'needs positive numbers' if kind in ARITIES else 'unknown'}; write {known}"


ARITIES: Final[dict[str, tuple[int, ...]]] = {
    "at-once": (0,),
    "fixed": (1,),
    "poisson": (1,),
    "gamma": (2,),
    "trace": (0, 1),
}
