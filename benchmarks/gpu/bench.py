"""What every phase is given: the device, how large to be, where rows of figures go, and clocks."""

import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

Call = Callable[[], object]
# More than any cache holds: inputs that take turns over this much are read from memory.
ROTATED_BYTES = 256 << 20
_SLEEP_CYCLES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    device: torch.device
    is_tiny: bool
    dtype: torch.dtype
    out: Path

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def row(self, table: str, **figures: object) -> None:
        """Kept at once: a phase that dies later has still said this."""
        with self.out.open("a") as file:
            file.write(json.dumps({"table": table, **figures}) + "\n")

    def free(self) -> None:
        """Give back what nobody holds: a device and its recorded steps hold each other."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def sized(self, full: int, tiny: int) -> int:
        return tiny if self.is_tiny else full

    def copies(self, bytes_each: int) -> int:
        """How many inputs must take turns so that none is still in a cache."""
        return 1 if self.is_tiny else max(2, min(32, -(-ROTATED_BYTES // max(1, bytes_each))))

    def seconds(
        self,
        calls: Sequence[Call],
        *,
        repeats: int = 5,
        rounds: int = 3,
        of: Callable[[Sequence[float]], float] = statistics.median,
    ) -> float:
        """Median seconds of a call; the calls take turns, `rounds` times each, back to back."""
        if self.is_tiny:
            repeats = rounds = 1
        for call in calls:
            call()
        return of([self._timed(calls, rounds) / (rounds * len(calls)) for _ in range(repeats)])

    def in_turns(self, ways: Mapping[str, Call], turns: int = 5) -> dict[str, list[float]]:
        """What each says, `turns` times: A B, then B A, then A B, so that what drifts meets both.

        A first time comes before them and does not count.
        """
        found: dict[str, list[float]] = {name: [] for name in ways}
        names = list(ways)
        for turn in range(-1, self.sized(turns, 1)):
            for name in names if turn % 2 else reversed(names):
                said = cast(float, ways[name]())
                found[name] += [said] if turn >= 0 else []
        return found

    def _timed(self, calls: Sequence[Call], rounds: int) -> float:
        if not self.is_gpu:
            started = time.perf_counter()
            _run(calls, rounds)
            return time.perf_counter() - started
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        # The host gets ahead meanwhile, so that launches are not what is timed.
        torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
        begin.record()
        _run(calls, rounds)
        end.record()
        torch.cuda.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def recorded(self, call: Call) -> Call:
        """The call as a CUDA graph: what it costs without its launches."""
        if not self.is_gpu:
            return call
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()

        def replay(held: Call = call) -> None:
            """A graph does not hold what it reads; the call does."""
            graph.replay()

        return replay


def _run(calls: Sequence[Call], rounds: int) -> None:
    for _ in range(rounds):
        for call in calls:
            call()
