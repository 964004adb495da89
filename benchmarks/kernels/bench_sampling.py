"""sampling: 64 rows of 32,000 logits, greedy, plain and filtered; GB/s of logits and of peak.
Then what penalties cost beside it, by how many tokens each row has seen.

python -m benchmarks.kernels.bench_sampling
"""

import torch

from benchmarks.kernels.recorded import record
from gpu_worker.service.machine_rates import read_bytes_per_s, times_s
from kernels import native
from kernels.sampling.logit_edits import EditTensors, edit_logits
from kernels.sampling.sample import SamplingTensors, sample, sample_reference

ROWS, VOCAB = 64, 32000
SEEN = (128, 512, 4096)
# temperature, top_k, top_p, min_p
CASES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top_k": (1.0, 50, 1.0, 0.0),
    "top_p": (1.0, 0, 0.9, 0.0),
    "min_p": (1.0, 0, 1.0, 0.05),
    "all": (0.7, 50, 0.9, 0.05),
}


def params(temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingTensors:
    return SamplingTensors(
        temperature=torch.full((ROWS,), temperature),
        top_k=torch.full((ROWS,), top_k),
        top_p=torch.full((ROWS,), top_p),
        min_p=torch.full((ROWS,), min_p),
        seed=torch.arange(ROWS),
        choice=torch.zeros(ROWS, dtype=torch.int64),
        position=torch.full((ROWS,), 100),
    )


def penalties(seen: int) -> EditTensors:
    """All three, in every row, over its own `seen` tokens."""
    none, floats = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
    return EditTensors(
        bias_rows=none,
        bias_ids=none,
        biases=floats,
        seen_rows=torch.arange(ROWS).repeat_interleave(seen),
        seen_ids=torch.cat([torch.randperm(VOCAB)[:seen] for _ in range(ROWS)]),
        seen_counts=torch.ones(ROWS * seen),
        repetition=torch.full((ROWS,), 1.1),
        presence=torch.full((ROWS,), 0.5),
        frequency=torch.full((ROWS,), 0.1),
        forbidden_rows=none,
        forbidden_ids=none,
        allowed_rows=none,
        allowed_ids=none,
    )


def measure_penalties(logits: torch.Tensor) -> None:
    for seen in SEEN:
        edits = penalties(seen)
        best, median = times_s(lambda edits=edits: edit_logits(logits, edits), repeats=9)  # type: ignore[misc]
        record(
            "logit_edits",
            path="torch",
            case=f"penalties_{seen}",
            rows=ROWS,
            vocab=VOCAB,
            median_ms=round(median * 1e3, 3),
            best_ms=round(best * 1e3, 3),
        )


def main() -> None:
    torch.manual_seed(0)
    native.build()
    peak = read_bytes_per_s()
    logits = torch.randn(ROWS, VOCAB) * 3
    for case, options in CASES.items():
        for path, run in (("launcher", sample), ("torch", sample_reference)):
            p = params(*options)
            best, median = times_s(
                lambda run=run, p=p: run(logits, p),  # type: ignore[misc]
                repeats=9 if path == "launcher" else 3,
            )
            record(
                "sampling",
                path=path,
                case=case,
                rows=ROWS,
                vocab=VOCAB,
                median_ms=round(median * 1e3, 3),
                best_ms=round(best * 1e3, 3),
                logits_gb_per_s=round(logits.numel() * 4 / median / 1e9, 2),
                read_fraction=round(logits.numel() * 4 / median / peak, 3),
            )
    measure_penalties(logits)


if __name__ == "__main__":
    main()
