"""transformers' continuous batching beside the worker, on the same weights in the same process.

Both have compiled, recorded and served a first few requests before the clock starts.
"""

import importlib.util
import time
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.correctness import oracle, weights_of
from benchmarks.gpu.crowd import Crowd, Job, jobs_uniform
from benchmarks.gpu.in_process import compute_in_process, settle
from benchmarks.gpu.models import Shape, limits_of, resident, shapes
from benchmarks.gpu.steps import quick_on_cpu
from gpu_worker.runner.warm_up import make_ready

# What they need; a machine that lacks it says so, instead of looking for it on the net.
ATTENTIONS = {
    "sdpa": "torch",
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
}
WAIT_S = 40.0
FIRST_TOKENS = 4


def beside(bench: Bench) -> None:
    # Its manager changes on one thread what it made on another, which tensors made in inference
    # mode refuse.
    with torch.inference_mode(False), torch.no_grad():
        _beside(bench)


def _beside(bench: Bench) -> None:
    shape = shapes(bench)[0]
    rows = bench.sized(32, 3)
    jobs = jobs_uniform(rows, bench.sized(200, 4), bench.sized(300, 8), shape.vocab)
    model = oracle(shape, bench.dtype, bench.device)
    ours = kaiten(model, shape, jobs, bench)
    bench.row("beside transformers", what="kaiten", shape=shape.name, rows=rows, tokens_per_s=ours)
    bench.free()
    for attention, needed in ATTENTIONS.items():
        try:
            if importlib.util.find_spec(needed) is None:
                raise ModuleNotFoundError(f"{needed} is not installed")
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
        device = resident(shape, weights, limits, bench, ready=make_ready)
        crowd = Crowd(limits, jobs)
        seconds = compute_in_process(device, crowd, settle(device)).seconds
        return crowd.tokens / seconds


def continuous(model: Any, attention: str, jobs: list[Job], bench: Bench) -> float:
    """Tokens per second, every request due at once."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model.set_attn_implementation(f"paged|{attention}")
    plain: Any = GenerationConfig(
        max_new_tokens=max(job.output for job in jobs),
        do_sample=False, eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    # It looks at a GPU's memory, and at some machines' in vain.
    size = None if bench.is_gpu else ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    with model.continuous_batching_context_manager(
        generation_config=plain, continuous_batching_config=size
    ) as manager:
        # Other prompts, or those timed would be found in its cache.
        few = [Job(prompt=job.prompt[::-1], output=FIRST_TOKENS) for job in jobs]
        answered(manager, few, "first")
        started_s = time.perf_counter()
        tokens = answered(manager, jobs, "timed")
        return tokens / (time.perf_counter() - started_s)


def answered(manager: Any, jobs: list[Job], name: str) -> int:
    """How many tokens came, all requests due at once."""
    started_s, tokens, left = time.perf_counter(), 0, len(jobs)
    for index, job in enumerate(jobs):
        manager.add_request(
            list(job.prompt), request_id=f"{name} {index}", max_new_tokens=job.output,
            eos_token_id=-1,
        )  # fmt: skip
    while left:
        answer = manager.get_result(timeout=1)
        if answer is None:
            if not manager.is_running() or time.perf_counter() - started_s > WAIT_S:
                raise RuntimeError("continuous batching stopped before its requests did")
        elif answer.error:
            raise RuntimeError(answer.error)
        elif answer.is_finished():
            tokens, left = tokens + len(answer.generated_tokens), left - 1
    return tokens
