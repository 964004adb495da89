"""transformers' continuous batching beside the worker, on the same weights in the same process."""

import time
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.correctness import oracle, weights_of
from benchmarks.gpu.crowd import Crowd, Job, jobs_uniform
from benchmarks.gpu.in_process import compute_in_process
from benchmarks.gpu.models import Shape, limits_of, resident, shapes
from benchmarks.gpu.steps import quick_on_cpu

# Best first; what a machine lacks says so.
ATTENTIONS = ("flash_attention_3", "flash_attention_2", "sdpa")
WAIT_S = 40.0


def beside(bench: Bench) -> None:
    shape = shapes(bench)[0]
    rows = bench.sized(32, 3)
    jobs = jobs_uniform(rows, bench.sized(200, 4), bench.sized(300, 8), shape.vocab)
    model = oracle(shape, bench.dtype, bench.device)
    ours = kaiten(model, shape, jobs, bench)
    bench.row("beside transformers", what="kaiten", shape=shape.name, rows=rows, tokens_per_s=ours)
    bench.free()
    for attention in ATTENTIONS if bench.is_gpu else ("sdpa",):
        try:
            theirs = continuous(model, attention, jobs, bench)
        except Exception as error:  # a kernel that is not installed is a figure too
            what = f"{type(error).__name__}: {error}"[:80]
            bench.row(
                "beside transformers", what=attention, shape=shape.name, rows=rows, error=what
            )
        else:
            bench.row(
                "beside transformers", what=attention, shape=shape.name, rows=rows,
                tokens_per_s=theirs, kaiten_is=ours / theirs,
            )  # fmt: skip


def kaiten(model: Any, shape: Shape, jobs: list[Job], bench: Bench) -> float:
    """Tokens per second."""
    with quick_on_cpu(bench):
        weights = weights_of(model, shape, bench.dtype, bench.device)
        limits = limits_of(
            shape, slots=len(jobs), context=bench.sized(1024, 32), step_tokens=bench.sized(4096, 16)
        )
        device = resident(shape, weights, limits, bench)
        crowd = Crowd(limits, jobs)
        started_s = time.perf_counter()
        compute_in_process(device, crowd)
        return crowd.tokens / (time.perf_counter() - started_s)


def continuous(model: Any, attention: str, jobs: list[Job], bench: Bench) -> float:
    """Tokens per second, every request due at once."""
    from transformers import GenerationConfig

    model.set_attn_implementation(f"paged|{attention}")
    plain: Any = GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max(job.output for job in jobs),
        do_sample=False, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    tokens, left = 0, len(jobs)
    with (
        torch.inference_mode(),
        model.continuous_batching_context_manager(generation_config=plain) as manager,
    ):
        started_s = time.perf_counter()
        for index, job in enumerate(jobs):
            manager.add_request(
                list(job.prompt), request_id=str(index), max_new_tokens=job.output, eos_token_id=-1
            )
        while left:
            answer = manager.get_result(timeout=1)
            if answer is None:
                if not manager.is_running() or time.perf_counter() - started_s > WAIT_S:
                    raise RuntimeError("continuous batching stopped before its requests did")
            elif answer.error:
                raise RuntimeError(answer.error)
            elif answer.is_finished():
                tokens, left = tokens + len(answer.generated_tokens), left - 1
        return tokens / (time.perf_counter() - started_s)


PARTS = (beside,)
