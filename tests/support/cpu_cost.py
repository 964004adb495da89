"""What something costs a processor, for a test that it must not grow.

A processor's clock counts what a machine's owner takes away from it, too, so one measure says at
most. Of several the least counts, and a bound is a multiple of other work on the same processor.
"""

import time
from collections.abc import Callable, Iterator, Sequence

GOES = 6


def goes_until_below(bound: float, costs: Sequence[float]) -> Iterator[int]:
    """Goes of a loop that appends a cost each time, until one is below the bound."""
    for go in range(GOES):
        yield go
        if costs[-1] < bound:
            return
    raise AssertionError(f"never below {bound}: {list(costs)}")


def costs_at_most(
    times: float, work: Callable[[], object], yardstick: Callable[[], object]
) -> None:
    """The work takes this many times the yardstick's processor time. AssertionError: more."""
    works_s: list[float] = []
    yardsticks_s: list[float] = []
    ratios: list[float] = []
    for _ in goes_until_below(times, ratios):
        works_s.append(_cpu_s(work))
        yardsticks_s.append(_cpu_s(yardstick))
        ratios.append(min(works_s) / min(yardsticks_s))


def _cpu_s(work: Callable[[], object]) -> float:
    begin_s = time.thread_time()
    work()
    return time.thread_time() - begin_s
