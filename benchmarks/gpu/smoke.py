"""Does anything run here? Each kernel once, one recorded step, one small worker: under a minute.

It comes first and alone. A wrong kernel, or a GPU that records nothing, is known before six
processes compile for minutes; and torch, read from a disk that may be cold, is read once.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.correctness import BOUNDS, CHECKS, _error
from benchmarks.gpu.crowd import Crowd, Job, jobs_uniform
from benchmarks.gpu.in_process import compute_in_process, settle
from benchmarks.gpu.models import TINY_QWEN3, limits_of, pages_of, random_weights, resident
from benchmarks.gpu.steps import quick_on_cpu
from gpu_worker.model.decoder import Decoder, Queries, StepTensors
from gpu_worker.model.weights import Weights
from gpu_worker.runner.device_streams import streams_for
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.warm_up import make_ready
from kernels import dispatch
from kernels.norms_rope.rms_norm import rms_norm, rms_norm_reference

# Prompts of more than a step has tokens, and contexts of several blocks.
JOBS, SHORTEST, LONGEST, STEP_TOKENS = 3, 12, 30, 16
# So large that what a row attends to decides which token is likeliest, and no token repeats itself.
DEVIATION = 0.3


def kernels(bench: Bench) -> None:
    """Small shapes; `correctness.kernels` has those of models."""
    small, wrong = replace(bench, is_tiny=True), []
    for name, check in CHECKS.items():
        started_s = time.perf_counter()
        error = max(_error(own, known) for own, known in check(small))
        bound = 0.0 if name == "sampling" else BOUNDS[bench.dtype]
        seconds = time.perf_counter() - started_s
        bench.row("smoke", what=name, seconds=seconds, error=error, ok=error <= bound)
        wrong += [] if error <= bound else [f"{name} is off by {error}, more than {bound}"]
    assert not wrong, "; ".join(wrong)


def graph(bench: Bench) -> None:
    """A kernel, recorded as steps are and launched again over another input."""
    started_s = time.perf_counter()
    streams = streams_for(bench.device)
    x, weight = torch.ones(4, 48, device=bench.device), torch.ones(48, device=bench.device)
    out = torch.zeros_like(x)

    def launch() -> None:
        out.copy_(rms_norm(x, weight, 1e-5))

    streams.finish()
    with streams.computing():
        again = streams.record(launch)
        x.copy_(torch.arange(x.numel(), device=bench.device).view_as(x))
        again()
    streams.finish()
    error = _error(out, rms_norm_reference(x, weight, 1e-5))
    seconds = time.perf_counter() - started_s
    bench.row("smoke", what="graph", seconds=seconds, error=error, ok=error <= 2e-5)
    assert error <= 2e-5, f"a recorded kernel is off by {error}"


def worker(bench: Bench) -> None:
    """A tiny model's tokens, recorded and unrecorded: each the likeliest by the definition of every
    kernel, in float32.
    """
    exact, started_s = replace(bench, dtype=torch.float32), time.perf_counter()
    wrong, weights = {}, telling_weights(exact)
    jobs = jobs_uniform(JOBS, SHORTEST, LONGEST, TINY_QWEN3.vocab)
    ways = {"recorded": make_ready, "unrecorded": lambda runner: None}
    with quick_on_cpu(bench):
        outputs = {name: _outputs(weights, exact, jobs, ready) for name, ready in ways.items()}
    for name, each in outputs.items():
        pairs = zip(jobs, each, strict=True)
        wrong[name] = sum(likeliest(weights, exact, job, output) != output for job, output in pairs)
    seconds, is_ok = time.perf_counter() - started_s, not any(wrong.values())
    bench.row("smoke", what="worker", seconds=seconds, rows=JOBS, **wrong, ok=is_ok)
    assert is_ok, f"of {JOBS} outputs these are not what the model says: {wrong}"


def telling_weights(bench: Bench) -> Weights:
    """Of which the likeliest tokens depend on the whole context; the same on every device."""
    drawn_on = torch.device("cpu")
    return random_weights(TINY_QWEN3, bench, deviation=DEVIATION, drawn_on=drawn_on)


def _outputs(
    weights: Weights, bench: Bench, jobs: Sequence[Job], ready: Callable[[GraphRunner], None]
) -> list[list[int]]:
    limits = limits_of(TINY_QWEN3, slots=4, context=2 * LONGEST, step_tokens=STEP_TOKENS)
    runner = resident(TINY_QWEN3, weights, limits, bench, ready=ready)
    crowd = Crowd(limits, jobs)
    compute_in_process(runner, crowd, settle(runner))
    return crowd.outputs


def likeliest(weights: Weights, bench: Bench, job: Job, output: Sequence[int]) -> list[int]:
    """After the prompt, and after each token of the output but the last."""
    found: list[int] = tops(weights, bench, job, output).indices[:, 0].tolist()
    return found


def tops(weights: Weights, bench: Bench, job: Job, output: Sequence[int]) -> Any:
    """The two likeliest of each place: all at once, in blocks that stand side by side, by torch."""
    tokens = [*job.prompt, *output[:-1]]
    count, device = len(tokens), bench.device
    limits = limits_of(TINY_QWEN3, slots=1, context=count, step_tokens=count)
    places, ends = torch.arange(count, device=device), torch.tensor([0, count], device=device)
    blocks = torch.arange(limits.block_count, dtype=torch.int32, device=device)
    step = StepTensors(
        token_ids=torch.tensor(tokens, device=device),
        positions=places,
        slot_mapping=places[None],
        queries=Queries(starts=ends.int(), context_lengths=ends[1:].int(), row_max=count),
        block_tables=blocks[None, None],
    )
    pages = pages_of(TINY_QWEN3, limits, bench)
    decoder = Decoder(TINY_QWEN3.config, weights, pages, context_tokens=count)
    with torch.inference_mode(), dispatch.forced("torch"):
        logits = decoder.logits(decoder.forward(step), places[len(job.prompt) - 1 :])
    return logits.float().topk(2)
