"""Each way of computing the same beside its alternative: what kernels/variants.py wants to know.

`gain` is the time without it over the time with it; what is above 1 on every line may be a default.
"""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from benchmarks.gpu.attention import attend_chunk
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import random_weights, shapes
from benchmarks.gpu.steps import quick_on_cpu, run_steps
from kernels import variants


def each(bench: Bench) -> None:
    tokens = bench.sized(8192, 24)
    _beside(
        bench, "prefill-ahead", "a prompt", 1, tokens,
        lambda: bench.seconds([attend_chunk(bench, tokens, tokens, has_own=True)]),
    )  # fmt: skip
    shape, context = shapes(bench)[-1], bench.sized(1024, 24)
    with quick_on_cpu(bench):
        weights = random_weights(shape, bench)

        def step_s(rows: int) -> float:
            _, at_s = run_steps(shape, weights, rows, context, bench)
            return statistics.median(b - a for a, b in pairwise(at_s))

        for rows in (2,) if bench.is_tiny else (1, 64):
            for name in ("decode-in-one", "programmatic-launch"):
                _beside(bench, name, shape.name, rows, context, partial(step_s, rows))


def _beside(
    bench: Bench, name: str, what: str, rows: int, context: int, seconds_of: Callable[[], float]
) -> None:
    found = []
    for is_taken in (False, True):
        with variants.forced(name, is_taken):
            found.append(seconds_of())
    without, taken = found
    bench.row(
        "variants", what=name, of=what, rows=rows, context=context,
        default=variants.is_on(name), gain=without / taken,
        without_ms=without * 1e3, taken_ms=taken * 1e3,
    )  # fmt: skip
