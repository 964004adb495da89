"""What the machine allows: its bandwidth and matrix rate, and the time they would need for a load.

    python -m benchmarks.peers.floor [--dtype bf16] [--threads 2]     measures, prints one JSON line

With one thread its CPU time is the clock, which a machine's other work hardly touches.

One step of an ideal engine costs max(weight bytes / bandwidth, operations / rate) + KV bytes /
bandwidth. `ideal` plays a crowd through such an engine: every seat is taken, every step is full.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kaiten.bench.workload import Job

ROOT = Path(__file__).resolve().parents[2]
DTYPE_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Measured, in the run it is compared with."""

    read_bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a Llama decides its cost. Parameters that every token, and every output, touches."""

    layers: int
    hidden_size: int
    kv_size: int
    body_parameters: int
    head_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ideal:
    """The physical floor of a crowd."""

    wall_s: float
    output_tokens_per_s: float
    latency_mean_s: float
    steps: int


def shape_of(model: Path) -> Shape:
    """From a checkpoint's config.json."""
    config = json.loads((model / "config.json").read_text())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size = head_dim * config["num_attention_heads"]
    kv_size = head_dim * config["num_key_value_heads"]
    per_layer = (
        2 * hidden * q_size + 2 * hidden * kv_size + 3 * hidden * config["intermediate_size"]
    )
    return Shape(
        layers=layers,
        hidden_size=q_size,
        kv_size=kv_size,
        body_parameters=layers * per_layer,
        head_parameters=hidden * config["vocab_size"],
    )


@dataclass(slots=True, eq=False)
class _Member:
    prompt: int
    output: int
    done: int = 0
    made: int = 0


def ideal(
    jobs: Sequence[Job], shape: Shape, machine: Machine, dtype: str, *, slots: int, step_tokens: int
) -> Ideal:
    """All jobs due at once; seats are filled in order, prompts in chunks of what is left."""
    waiting = deque(_Member(prompt=len(job.prompt), output=job.output_tokens) for job in jobs)
    running: list[_Member] = []
    wall_s, steps, ends = 0.0, 0, []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.popleft())
        wall_s += _step_s(running, shape, machine, DTYPE_BYTES[dtype], step_tokens)
        steps += 1
        ends += [wall_s for member in running if member.made >= member.output]
        running = [member for member in running if member.made < member.output]
    tokens = sum(job.output_tokens for job in jobs)
    return Ideal(
        wall_s=wall_s,
        output_tokens_per_s=tokens / wall_s,
        latency_mean_s=sum(ends) / len(ends),
        steps=steps,
    )


def _step_s(
    running: Sequence[_Member], shape: Shape, machine: Machine, size: int, step_tokens: int
) -> float:
    """Advance everybody by one step; its time."""
    tokens = outputs = attended = read = 0
    for member in running:
        count = min(step_tokens - tokens, max(member.prompt - member.done, 1))
        if not count:
            break
        tokens += count
        # Each of them attends to itself and to all before it.
        attended += count * member.done + count * (count + 1) // 2
        member.done += count
        read += member.done
        if member.done >= member.prompt:
            outputs += 1
            member.made += 1
    attention = 4 * shape.hidden_size * shape.layers * attended
    flops = 2 * shape.body_parameters * tokens + 2 * shape.head_parameters * outputs + attention
    weights = size * (shape.body_parameters + (shape.head_parameters if outputs else 0))
    kv_bytes = read * 2 * shape.kv_size * shape.layers * size
    compute_s = flops / machine.flops_per_s
    return max(weights / machine.read_bytes_per_s, compute_s) + kv_bytes / machine.read_bytes_per_s


def measure(dtype: str, threads: int) -> Machine:
    """In a process of its own, whose memory and threads are nobody else's."""
    command = [sys.executable, "-m", "benchmarks.peers.floor", "--dtype", dtype]
    command += ["--threads", str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return Machine(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", choices=DTYPE_BYTES, default="bf16")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's choice")
    chosen = parser.parse_args()
    import torch

    from gpu_worker.service.machine_rates import matmul_flops_per_s, read_bytes_per_s
    from kernels import native

    native.build()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[chosen.dtype]
    clock = time.thread_time if chosen.threads == 1 else time.perf_counter
    found = {
        "read_bytes_per_s": read_bytes_per_s(clock),
        "flops_per_s": matmul_flops_per_s(dtype, 2048, clock),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
