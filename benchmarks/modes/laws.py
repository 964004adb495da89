"""Who asks what, and when: fixed by a seed. Lengths are the laws of `kaiten.bench`, the load is a
share of what the worker could do if it never idled.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from benchmarks.modes.costs import Costs
from kaiten.bench.arrivals import due_times
from kaiten.bench.laws import azure_code, azure_conversation, mooncake
from kaiten.bench.workload import Shape, fill
from scheduler_svc.core.types import Request

Shapes = list[Shape]


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and where its answer ends by itself: nobody who decides knows that."""

    request: Request
    output_tokens: int


QUIET: Final = "quiet"
# Of the Mooncake trace: its prompts are too long for a small worker, a quarter of them is not.
PART: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """How many requests of which shape; how they arrive at a share of capacity, or all at once."""

    says: str
    draw: Callable[[np.random.Generator, int], Shapes]
    count: int = 300
    # What clients ask for at most, whatever they need.
    max_tokens: int = 1024
    # Coefficient of variation of the time between arrivals; None: all at once.
    variation: float | None = 1.0
    load: float = 0.8
    # Arrive together, so many.
    together: int = 1

    def jobs(self, seed: int, costs: Costs, tenant: str = "") -> tuple[Job, ...]:
        """The trace, in the order of arrival."""
        rng = np.random.default_rng(seed)
        shapes = self.draw(rng, self.count)
        due_ns = self._due(shapes, rng, costs)
        filled = fill(shapes, rng, 32000)
        return numbered(
            (at_ns, job.prompt, self.max_tokens, job.output_tokens, tenant)
            for job, at_ns in zip(filled, due_ns, strict=True)
        )

    def _due(self, shapes: Shapes, rng: np.random.Generator, costs: Costs) -> Sequence[int]:
        if self.variation is None:
            return [0] * len(shapes)
        work_ns = sum(costs.alone(one.prompt_tokens, one.output_tokens) for one in shapes)
        rate = self.load * len(shapes) / (work_ns / 1e9) / self.together
        gaps = due_times(f"gamma:{rate}:{self.variation}", fill(shapes, rng, 32000), rng)
        return [int(gaps[index // self.together] * 1e9) for index in range(len(shapes))]


def writing(rng: np.random.Generator, count: int) -> Shapes:
    """Short prompts, long answers."""
    prompts = rng.lognormal(4.5, 0.6, count).astype(int).clip(16, 1000).tolist()
    outputs = rng.lognormal(5.8, 0.5, count).astype(int).clip(32, 1500).tolist()
    return [
        Shape(prompt_tokens=one, output_tokens=other)
        for one, other in zip(prompts, outputs, strict=True)
    ]


def reading(rng: np.random.Generator, count: int) -> Shapes:
    """Long prompts that share their beginnings, short answers."""
    return [
        replace(
            shape,
            prompt_tokens=min(-(-shape.prompt_tokens // PART), 12_000),
            output_tokens=-(-shape.output_tokens // PART),
            blocks=shape.blocks[
                : -(-min(shape.prompt_tokens, 12_000 * PART) // shape.block_tokens)
            ],
            block_tokens=shape.block_tokens // PART,
        )
        for shape in mooncake(rng, count)
    ]


def long(rng: np.random.Generator, count: int) -> Shapes:
    """The same, and nothing is shared."""
    return [replace(shape, blocks=()) for shape in reading(rng, count)]


LAWS: Final[dict[str, Law]] = {
    "chat": Law(says="Azure 2023 conversation", draw=azure_conversation, variation=1.09),
    "code": Law(says="Azure 2023 code, CV 13.2", draw=azure_code, variation=13.2, load=0.5),
    "long": Law(says="Mooncake's lengths, a quarter", draw=long, count=150, max_tokens=512),
    "bursts": Law(says="conversations, 24 at once", draw=azure_conversation, together=24, load=0.7),
    "prefix": Law(
        says="as long, 37 % of it shared", draw=reading, count=200, max_tokens=512, load=2.0
    ),
    "writing": Law(says="short prompts, long answers", draw=writing, max_tokens=2048),
    "batch": Law(says="conversations, all at once", draw=azure_conversation, variation=None),
}


def flooded(
    seed: int, costs: Costs, *, count: int, is_flooded: bool, tokens_max: int | None = None
) -> tuple[Job, ...]:
    """A quiet tenant's conversations at a tenth of capacity, beside a tenant that sends half as
    much again as the worker can do, and may have so many tokens running; or the same of the quiet
    one alone.
    """
    law = replace(LAWS["chat"], count=count, load=0.1)
    quiet = law.jobs(seed, costs, QUIET)
    crowd = replace(law, count=15 * count, load=1.5).jobs(seed + 1, costs, "flood")
    end_ns = quiet[-1].request.arrived_ns
    flood = [
        replace(job, request=replace(job.request, tenant_tokens_max=tokens_max))
        for job in crowd
        if job.request.arrived_ns < end_ns
    ]
    both = sorted([*quiet, *flood * is_flooded], key=lambda job: job.request.arrived_ns)
    return tuple(
        replace(job, request=replace(job.request, id=str(number), sequence_id=number))
        for number, job in enumerate(both, start=1)
    )


def numbered(rows: Iterable[tuple[int, tuple[int, ...], int, int, str]]) -> tuple[Job, ...]:
    """Arrival, prompt, `max_tokens`, tokens of the answer, tenant; ids as they are minted."""
    return tuple(
        Job(
            Request(
                id=str(number),
                sequence_id=number,
                prompt=prompt,
                max_tokens=max_tokens,
                arrived_ns=at_ns,
                tenant=tenant,
            ),
            min(output_tokens, max_tokens),
        )
        for number, (at_ns, prompt, max_tokens, output_tokens, tenant) in enumerate(rows, start=1)
    )
