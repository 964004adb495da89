"""What the compiled kernels take on this processor: one linear and one attention, timed.

Where nobody has measured which of a processor's binaries is the better one, a worker's start times
them (native.build), and bfloat16 where it might be emulated (packed_linear.is_fast); `kaiten
doctor` says what they take.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

from kernels.cpp.library import Library

Clock = Callable[[], float]

ROWS: Final = 16
WIDTH: Final = 1024
CONTEXT: Final = 512
HEADS: Final = 8
HEAD_DIM: Final = 64
# A rival must be so much faster than what comes before it: less is chance, and of two machines
# alike one would choose otherwise than the other, with other last bits.
MARGIN: Final = 1.25
_REPEATS: Final = 9
_BLOCK_SIZE: Final = 16


def chosen(times_s: Mapping[str, float]) -> str:
    """The first, unless another takes less by `MARGIN`."""
    first, best = next(iter(times_s)), min(times_s, key=times_s.__getitem__)
    return best if times_s[best] * MARGIN < times_s[first] else first


def is_emulated(seconds: float, float32_s: float) -> bool:
    """Whether what takes so long in some dtype had better be computed in float32."""
    return seconds > MARGIN * float32_s


def linear_s(library: Library, dtype: torch.dtype, clock: Clock = time.perf_counter) -> float:
    """Best seconds of `ROWS` rows against `WIDTH` x `WIDTH` weights."""
    weight = torch.full((WIDTH, WIDTH), 0.01, dtype=dtype)
    packed = torch.empty(library.packed_shape(weight), dtype=dtype)
    library.pack_linear(weight, packed)
    x = torch.ones(ROWS, WIDTH, dtype=dtype)
    return best_s(lambda: library.linear(x, packed, None, WIDTH), clock)


def attention_s(library: Library, dtype: torch.dtype, clock: Clock = time.perf_counter) -> float:
    """Best seconds of `ROWS` rows that decode behind `CONTEXT` positions each."""
    blocks = ROWS * CONTEXT // _BLOCK_SIZE
    pages = torch.ones(blocks, HEADS, _BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    tables = torch.arange(blocks, dtype=torch.int32).view(ROWS, -1)
    starts = torch.arange(ROWS + 1, dtype=torch.int32)
    contexts = torch.full((ROWS,), CONTEXT, dtype=torch.int32)
    q = torch.ones(ROWS, HEADS, HEAD_DIM, dtype=dtype)
    return best_s(
        lambda: library.paged_attention(q, pages, pages, tables, starts, contexts, 0.125, 0, 0.0),
        clock,
    )


def told(library: Library) -> str:
    """One line for people: what this binary takes here."""
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    attention = _listed({kind: attention_s(library, dtype) for kind, dtype in kinds.items()})
    attends = f"attention of {ROWS} rows over {CONTEXT} tokens {attention}"
    if not library.has_linear(torch.empty(2, 2)):
        return attends
    linear = _listed({kind: linear_s(library, dtype) for kind, dtype in kinds.items()})
    return f"a linear of {ROWS} rows, {WIDTH} x {WIDTH}, takes {linear}, {attends}"


def _listed(times_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times_s.items())


def compared(times_s: Mapping[str, float]) -> str:
    """Why one of several was chosen."""
    return f"timed here, a linear in bf16: {_listed(times_s)}"


def best_s(run: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    run()
    seconds = []
    for _ in range(_REPEATS):
        start = clock()
        run()
        seconds.append(clock() - start)
    return min(seconds)
