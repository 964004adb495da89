"""What can be said of a GPU, part by part, and the process that goes through some of them.

    python -m benchmarks.gpu.parts --said FILE [--device cpu] [--tiny] PART ...

FILE gets a JSON line per figure, and one when a part begins and when it is done. A part that fails
ends the process: a GPU that saw a bad access answers nothing in that process any more.
"""

import argparse
import faulthandler
import importlib
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A function of a module here, and the seconds it may take.

    All of them fit into the budget. What earlier parts left over, a later one may take too: up to
    twice its own.
    """

    name: str
    seconds: int


# First and alone, in one process: whether anything runs here, and torch read from a cold disk.
SMOKE: Final = (
    Part(name="smoke.kernels", seconds=25),
    Part(name="smoke.graph", seconds=5),
    Part(name="smoke.worker", seconds=20),
)
# Nothing here is timed, so they run beside each other. What compiles ahead leaves its kernels in
# Triton's folder: with none there, the parts that are timed would compile for a minute and more.
BESIDE: Final = (
    Part(name="correctness.kernels", seconds=75),
    Part(name="correctness.tokens", seconds=75),
    Part(name="correctness.fp8_kv", seconds=75),
    Part(name="large_pool.both_sides", seconds=75),
    Part(name="compile_ahead.large", seconds=75),
    Part(name="compile_ahead.small", seconds=75),
    Part(name="compile_ahead.attention", seconds=75),
    Part(name="compile_ahead.ways", seconds=75),
)
# One after the other: what matters most comes first, as time may run out.
IN_ORDER: Final = (
    Part(name="floors.measured", seconds=15),
    Part(name="attention.decode", seconds=25),
    Part(name="steps.decode_steps", seconds=40),
    Part(name="mixed.steps", seconds=20),
    Part(name="serving.arrivals", seconds=30),
    Part(name="attention.prefill", seconds=5),
    Part(name="beside_transformers.beside", seconds=30),
    Part(name="steps.idle", seconds=10),
    Part(name="attention.fp8", seconds=5),
    Part(name="serving.distance", seconds=20),
    Part(name="serving.large", seconds=20),
    Part(name="variants.each", seconds=20),
    Part(name="steps.deterministic", seconds=20),
    Part(name="attention.blocks", seconds=10),
    Part(name="attention.chunks", seconds=5),
    Part(name="serving.watched", seconds=10),
    Part(name="swaps.speed", seconds=5),
    Part(name="attention.beside_flashinfer", seconds=5),
)
ALL: Final = (*SMOKE, *BESIDE, *IN_ORDER)
NAMES: Final = tuple(part.name for part in ALL)
# Of the lines about parts themselves, among those with figures.
STATES: Final = "parts"


def main() -> int:
    asked = arguments()
    # Where it is when its time is up, for the log: whoever started this process asks, and ends it.
    # Nothing here asks by the clock: a thread that writes down where another one is may crash it.
    faulthandler.register(signal.SIGUSR1)
    from benchmarks.gpu.stand_ins import stand_in
    from gpu_worker.service import runtime

    stand_in()
    # As a worker does: how a GPU's memory is cut decides whether a step asks for more.
    runtime.prepare()
    import torch

    from benchmarks.gpu.bench import Bench
    from gpu_worker.service.device_selection import sum_in_float32

    sum_in_float32()
    bench = Bench(
        # With its number: a thread that takes a GPU must know which.
        device=torch.device("cuda:0" if asked.device == "cuda" else "cpu"),
        is_tiny=asked.tiny,
        dtype=torch.float32 if asked.device == "cpu" else torch.bfloat16,
        out=asked.said,
    )
    for name in asked.parts:
        started = time.monotonic()
        bench.row(STATES, part=name, state="begun")
        try:
            run(name, bench)
        except Exception as error:
            traceback.print_exc()
            what = f"{type(error).__name__}: {error}"
            bench.row(STATES, part=name, state="failed", error=what[:300])
            return 1
        seconds = round(time.monotonic() - started, 1)
        bench.row(STATES, part=name, state="done", seconds=seconds)
    return 0


def run(name: str, bench: "Bench") -> None:  # type: ignore[name-defined]  # noqa: F821
    import torch

    module, _, function = name.partition(".")
    with torch.inference_mode():
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(bench)
    bench.free()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--said", type=Path, required=True)
    parser.add_argument("parts", nargs="+", choices=NAMES)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
