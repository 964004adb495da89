"""What every kernel benchmark records. Timing, and the machine's ceilings: machine_rates."""

import os

import torch

from benchmarks import recording
from kernels import native


def record(kernel: str, **fields: object) -> None:
    """One JSON line, printed and appended to benchmarks/results/kernels_cpu.jsonl."""
    machine = {
        "threads": torch.get_num_threads(),
        "load_1min": round(os.getloadavg()[0], 1),
        "native": native.reason(),
    }
    recording.record("kernels_cpu", {"kernel": kernel, **fields, **machine}, save=True)
