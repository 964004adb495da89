"""How evenly decode attention's tasks lie on a GPU's programs: counted, no GPU is needed.

    python -m benchmarks.kernels.attention_tasks          --save appends to results/

A program takes a task of each n of the plan, as `item_of` of kernels/attention/triton_kernels.py
says. Its time is counted in positions it reads, and what a
task costs before its first (loads that wait for one another) in positions too: 16, about 2 us of an
H200 that reads 256 positions of a KV head with 8 programs a processor in 32 us. The fraction is
what an even share would take over what the last one takes. Whoever is done leaves its part of the
memory's rate to others, which is not counted: an H200 took 1 % less for tasks of several splits of
"256 of 100 to 2000", which lie less evenly.
"""

import argparse
import random
from collections.abc import Sequence

import torch

from benchmarks.recording import record
from kernels.attention.plan import SPLIT
from kernels.attention.plan_reference import attention_plan_reference

KV_HEADS = 8
# An H200's processors, eight programs each.
PROGRAMS = 132 * 8
TASK_POSITIONS = 16


def batches() -> dict[str, list[int]]:
    """Contexts of the rows."""
    draw = random.Random(1)
    chats = [int(draw.lognormvariate(6.5, 1.2)) + 10 for _ in range(64)]
    return {
        "1 of 8k": [8192],
        "1 of 131k": [131_072],
        "16 of 2k": [2048] * 16,
        "64 of 1k": [1024] * 64,
        "64 of 2k": [2048] * 64,
        "256 of 1k": [1024] * 256,
        "64 of 100 to 2000": [draw.randint(100, 2000) for _ in range(64)],
        "256 of 100 to 2000": [draw.randint(100, 2000) for _ in range(256)],
        "64 lognormal": chats,
        "1 of 100k, 63 of about 1k": [100_000, *(draw.randint(500, 1500) for _ in range(63))],
    }


def row_after_row(contexts: Sequence[int], split: int) -> list[int]:
    """Positions of each task, in the order of rows."""
    return [min(split, most - at) for most in contexts for at in range(0, most, split)]


def planned(contexts: Sequence[int], tasks_wanted: int | None = None) -> list[int]:
    """Positions of each task, as programs take them from the plan."""
    starts = torch.arange(len(contexts) + 1, dtype=torch.int32)
    tasks, *_ = attention_plan_reference(starts, torch.tensor(contexts), 1, 1, tasks_wanted)
    spans = [(context, start * SPLIT, size * SPLIT) for *_, context, _, _, start, size in tasks]
    return [min(size, most - start) for most, start, size in reversed(spans)]


def fraction(tasks: Sequence[int], task_positions: int = TASK_POSITIONS) -> float:
    """Of the time of the last program, what all would take that had the same to read."""
    times = [0] * PROGRAMS
    items = [task for task in tasks for _ in range(KV_HEADS)]
    for index, positions in enumerate(items):
        past, program = divmod(index, PROGRAMS)
        times[PROGRAMS - 1 - program if past % 2 else program] += positions + task_positions
    return sum(items) / PROGRAMS / max(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    for name, contexts in batches().items():
        orders = {
            "row_after_row": row_after_row(contexts, SPLIT),
            "longest_first": planned(contexts),
            "several_splits": planned(contexts, 2 * PROGRAMS // KV_HEADS),
        }
        found = {
            f"{order}_{words}": round(fraction(tasks, each), 3)
            for order, tasks in orders.items()
            for words, each in (("even", 0), ("with_task_cost", TASK_POSITIONS))
        }
        record("attention_tasks", {"batch": name, "counted": True, **found}, save=options.save)


if __name__ == "__main__":
    main()
