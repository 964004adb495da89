"""From options to a plan: which jobs, when. The same plan for every target and every round."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from kaiten.bench.arrivals import ArrivalsError, Times, due_times
from kaiten.bench.laws import LAWS
from kaiten.bench.options import BenchOptions, OptionsError
from kaiten.bench.traces import TraceError, read_trace
from kaiten.bench.workload import Job, Shape, fill, limited, scaled

VOCAB_SIZE: Final = 32_000
# The schedule must not change when the workload's own draws do.
ARRIVALS_SEED: Final = 99


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`due` is None in a closed loop."""

    jobs: tuple[Job, ...]
    due: Times | None
    shortened: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(job.prompt) for job in self.jobs)

    @property
    def output_tokens(self) -> int:
        return sum(job.output_tokens for job in self.jobs)


def make_plan(
    options: BenchOptions, *, vocab_size: int | None = None, context_tokens: int | None = None
) -> Plan:
    """OptionsError when the workload or the arrivals name nothing."""
    law = LAWS.get(options.workload)
    seed = options.seed if options.seed is not None else (law.seed if law else 0)
    rng = np.random.default_rng(seed)
    shapes = law.draw(rng, options.count or law.count) if law else _traced(options, rng)
    shapes = [scaled(shape, options.scale) for shape in shapes] if options.scale != 1 else shapes
    context_tokens = options.context_tokens or context_tokens
    kept = [limited(shape, context_tokens) for shape in shapes] if context_tokens else shapes
    jobs = fill(kept, rng, options.vocab_size or vocab_size or VOCAB_SIZE)
    return Plan(
        jobs=jobs,
        due=None if options.concurrency else _due(options, jobs),
        shortened=sum(before != after for before, after in zip(shapes, kept, strict=True)),
    )


def _traced(options: BenchOptions, rng: np.random.Generator) -> list[Shape]:
    path = Path(options.workload)
    if not path.is_file():
        known = ", ".join(LAWS)
        raise OptionsError(
            f"--workload {options.workload}: no such file, and no law. Laws: {known}"
        )
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines, options.count or 0, rng)
    except (TraceError, UnicodeDecodeError) as error:
        raise OptionsError(f"--workload {path}: {error}") from error


def _due(options: BenchOptions, jobs: Sequence[Job]) -> Times:
    try:
        return due_times(options.arrivals, jobs, np.random.default_rng(ARRIVALS_SEED))
    except ArrivalsError as error:
        raise OptionsError(f"--arrivals {error}") from error
