"""What all peers of a comparison share, and what each gives back."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from kaiten.bench.outcomes import Outcome
from kaiten.bench.workload import Job

START_S_MAX: Final = 600.0
RUN_S_MAX: Final = 900.0
WARM_JOBS, WARM_TOKENS = 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all peers of a comparison share. `pythons` has interpreters of peers' own packages."""

    model: Path
    dtype: str
    threads: int
    slots: int
    jobs: tuple[Job, ...]
    pythons: Mapping[str, str] = field(default_factory=dict)
    # A server is asked in static batches of so many; 0: everybody at once.
    static_seats: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What became of the jobs, and the token ids of the first of them: of all, or of a few.

    `cpu_s`: of the peer's processes, while the jobs were served.
    """

    outcomes: list[Outcome]
    start_s: float
    says: str
    tokens: list[list[int]]
    cpu_s: float


def warm_jobs(jobs: Sequence[Job]) -> list[Job]:
    """A small crowd before the clock starts, the same for everybody.

    What a peer compiles or allocates at its first batch is not its speed, and kaiten does all of it
    before it is ready. Other tokens than the jobs': a warm prefix cache would be a gift.
    """
    return [
        replace(job, prompt=job.prompt[::-1], output_tokens=min(job.output_tokens, WARM_TOKENS))
        for job in jobs[:WARM_JOBS]
    ]


Runner = Callable[[Setting], Answers]


class PeerError(Exception):
    """The peer is not there, or did not do what was asked."""


def quiet(setting: Setting) -> dict[str, str]:
    """An environment: no look at any hub, and as many threads as everybody else."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setting.threads)}
