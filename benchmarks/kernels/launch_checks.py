"""What a layer's launchers cost the host before Triton: checks and sizes, with kernels left out.

    python -m benchmarks.kernels.launch_checks                    of this tree
    python -m benchmarks.kernels.launch_checks --beside FOLDER    and of another, taking turns

--save appends to results/. Such steps as are recorded pay it once.
"""

import argparse
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from statistics import median

TURNS = 8
LAYERS = 400
ROOT = Path(__file__).resolve().parents[2]


class _Nothing:
    """In place of a kernel."""

    def __getitem__(self, grid: object) -> object:
        return lambda *values, **named: None


def layer_us() -> float:
    """Of the Triton launches of a layer, for rows that decode; on one thread."""
    os.environ["KAITEN_TRITON"] = "1"
    import torch

    from benchmarks.kernels.all_launches import MODULES
    from kernels import dispatch
    from kernels.attention.decode_attention import decode_attention
    from kernels.attention.plan import plan_attention, with_parts
    from kernels.norms_rope.gate_mul import gate_mul
    from kernels.norms_rope.rms_norm import add_rms_norm

    for module in (import_module(f"kernels.{name}") for name in MODULES):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, _Nothing())
    dispatch.force("triton")
    # Small, as what is counted does not depend on sizes, and memory is not to be counted.
    rows, heads, kv_heads, head_dim, hidden, inner = 4, 4, 1, 64, 64, 64
    half, ints = torch.bfloat16, torch.int32
    x, weight = torch.zeros(rows, hidden, dtype=half), torch.ones(hidden, dtype=half)
    gate_up = torch.zeros(rows, 2 * inner, dtype=half)
    qkv = torch.zeros(rows, heads + 2 * kv_heads, head_dim, dtype=half)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
    pages = torch.zeros(2, 128, kv_heads, 16, head_dim, dtype=half)
    tables, contexts = torch.zeros(rows, 64, dtype=ints), torch.full((rows,), 1000, dtype=ints)
    starts, positions = torch.arange(rows + 1, dtype=ints), torch.zeros(rows, dtype=torch.int64)
    cos_sin, scale = torch.zeros(2048, 2, head_dim // 2), head_dim**-0.5
    group = heads // kv_heads
    plan = plan_attention(
        starts, contexts, tokens=rows, group=group, dtype=half, context_max=1024, queries_max=1,
    )  # fmt: skip
    plan = with_parts(
        plan, rows=rows, tokens=rows, kv_heads=kv_heads, group=group, head_dim=head_dim
    )
    started = time.perf_counter()
    for _ in range(LAYERS):
        decode_attention(
            q, k, v, positions, cos_sin, pages[0], pages[1], positions, tables, starts, contexts,
            scale, plan=plan,
        )  # fmt: skip
        add_rms_norm(x, x, weight, 1e-5)
        gate_mul(gate_up)
        add_rms_norm(x, x, weight, 1e-5)
    return (time.perf_counter() - started) / LAYERS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--beside", type=Path)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--once", action="store_true", help="print a number, of the tree imported")
    options = parser.parse_args()
    if options.once:
        print(min(layer_us() for _ in range(3)))
        return
    trees = {"here": ROOT} | ({"beside": options.beside} if options.beside else {})
    found: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(TURNS):
        for name, root in trees.items():
            found[name].append(_of(root))
    from benchmarks.recording import record

    figures = {f"{name}_us_per_layer": round(median(each), 1) for name, each in found.items()}
    least = {f"{name}_least_us": round(min(each), 1) for name, each in found.items()}
    record("launch_checks", {"turns": TURNS, "launches": 4, **figures, **least}, save=options.save)


def _of(root: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, __file__, "--once"]
    done = subprocess.run(
        words, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    main()
