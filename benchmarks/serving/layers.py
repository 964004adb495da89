"""Where the CPU time of the whole stack goes, layer by layer, while 16 clients keep it busy.

    python -m benchmarks.serving.layers --py-spy PATH [--model FOLDER] [--save]

`py-spy` (a package of its own: pip install py-spy, in any environment) looks at every process 200
times a second. A sample belongs to the innermost frame that says where it is (LAYERS), and what a
process used is shared out as its samples are: threads without Python frames, of gRPC's core and of
the kernels, go with the rest. Figures are milliseconds of CPU time per output token; they add up to
what the processes used.
"""

import argparse
import asyncio
import contextlib
import signal
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks.peers.checkpoint import write_checkpoint
from benchmarks.recording import record
from benchmarks.serving.stack import cpu_s, pids_of, serving
from kaiten.bench.figures import figures_of
from kaiten.bench.options import BenchOptions
from kaiten.bench.plan import make_plan
from kaiten.bench.runner import Load
from kaiten.bench.targets import target_of

SAMPLES_PER_S: Final = 200
ASKERS, REQUESTS = 16, 80
TIMEOUT_S: Final = 600.0
# Part of a frame's path -> its layer. The first that fits counts, from the innermost frame on;
# frames of the standard library say nothing, except those that drive everything else.
LAYERS: Final = {
    "scheduler_svc/core/": "core",
    "scheduler_svc/wire": "wire",
    "gpu_worker/service/wire": "wire",
    "gateway/grpc/convert": "wire",
    "google/protobuf/": "wire",
    "kaiten/v1/": "wire",
    "scheduler_svc/": "scheduler shell",
    "ledger/": "ledger",
    "redis/": "ledger",
    "opentelemetry/": "telemetry",
    "structlog/": "telemetry",
    "service_kit/metrics": "telemetry",
    "gpu_worker/model/decoder": "device",
    "gpu_worker/runner/eager_runner": "device",
    "kernels/": "device",
    "torch/": "device",
    "gpu_worker/": "worker host",
    "gateway/": "gateway",
    "kaiten/": "client",
    "grpc/": "gRPC and event loop",
    "service_kit/": "gRPC and event loop",
    "asyncio/": "gRPC and event loop",
    "selectors.py": "gRPC and event loop",
}
# Innermost frames of threads that only wait.
WAITING: Final = ("select (selectors.py", "wait (threading.py", "_do_waitpid (", "get (queue.py")


def layer_of(stack: str) -> str:
    """Of one stack as py-spy writes it: frames from the outermost, `name (file:line)`."""
    for frame in reversed(stack.split(";")):
        path = frame.rpartition("(")[2]
        for part, layer in LAYERS.items():
            if part in path:
                return layer
    return "other Python"


def shares(raw: str) -> dict[str, float]:
    """By layer, of what one process did; they add up to 1."""
    found: defaultdict[str, int] = defaultdict(int)
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        if not any(waits in stack.rpartition(";")[2] for waits in WAITING):
            found[layer_of(stack)] += int(count)
    return {layer: count / sum(found.values()) for layer, count in found.items()}


@contextlib.contextmanager
def watching(py_spy: str, pids: Mapping[str, int], folder: Path) -> Iterator[None]:
    """What py-spy sees of each process until the block ends is then in folder/<role>."""
    watchers = []
    for role, pid in pids.items():
        command = [py_spy, "record", "--pid", str(pid), "--rate", str(SAMPLES_PER_S)]
        command += ["--format", "raw", "--nonblocking", "--output", str(folder / role)]
        watchers.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.send_signal(signal.SIGINT)
            said, _ = watcher.communicate()
            if watcher.returncode:
                raise RuntimeError(f"py-spy: {said.decode()}")


async def measure(py_spy: str, model: Path) -> dict[str, dict[str, float]]:
    """CPU milliseconds per output token: process -> layer -> figure."""
    jobs = make_plan(BenchOptions(count=REQUESTS, seed=3)).jobs
    with serving(str(model)) as stack, tempfile.TemporaryDirectory() as folder:
        target = target_of(stack.grpc)
        await target.prepare()
        await Load(target, timeout_s=TIMEOUT_S).closed_loop(jobs[:ASKERS], ASKERS)
        pids = pids_of(stack.pid)
        with watching(py_spy, pids, Path(folder)):
            before = cpu_s(stack.pid)
            outcomes = await Load(target, timeout_s=TIMEOUT_S).closed_loop(jobs[ASKERS:], ASKERS)
            after = cpu_s(stack.pid)
        await target.close()
        raws = {role: (Path(folder) / role).read_text() for role in pids}
    figures = figures_of(outcomes)
    if figures.errors or figures.wrong_length:
        raise RuntimeError(f"errors {figures.errors}, {figures.wrong_length} wrong lengths")
    found = {}
    for role, raw in raws.items():
        used_ms = (after[role] - before[role]) / figures.output_tokens * 1e3
        parts = shares(raw)
        found[role] = {
            layer: round(parts[layer] * used_ms, 4)
            for layer in sorted(parts, key=parts.__getitem__, reverse=True)
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--py-spy", required=True, help="the program")
    parser.add_argument("--model", type=Path, help="default: a random one of the 125m shape")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kaiten-models-") as scratch:
        model = chosen.model or write_checkpoint(Path(scratch) / "125m", "125m", "bf16")
        found = asyncio.run(measure(chosen.py_spy, model))
    total: defaultdict[str, float] = defaultdict(float)
    for layers in found.values():
        for layer, figure in layers.items():
            total[layer] += figure
    layers = {name: round(total[name], 4) for name in sorted(total, key=total.__getitem__)[::-1]}
    figures: dict[str, object] = {"askers": ASKERS, "cpu_ms_per_token": layers}
    record("layers", figures | {"processes": found}, save=chosen.save)


if __name__ == "__main__":
    main()
