"""A crowd from end to end: scheduler core and worker in one process, then with gRPC between.

256 requests, input and output lengths uniform from 100 to 1024, seed 0; without the store. The
floor is of that crowd: weights once per step, each position's keys and values once per token.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.crowd import Crowd, Job, due_in_turn, jobs_uniform
from benchmarks.gpu.floors import floors
from benchmarks.gpu.in_process import compute_in_process, settle
from benchmarks.gpu.models import Shape, limits_of, random_weights, resident, shapes
from benchmarks.gpu.steps import quick_on_cpu
from gpu_worker.batch.plans import StepResult
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.step_watch import Counters, CudaCounters, Watched
from gpu_worker.runner.warm_up import make_ready

# More than the crowd ever holds at once: 180 thousand, about.
POOL_TOKENS = 256 * 1024


def crowd_of(shape: Shape, bench: Bench) -> list[Job]:
    if bench.is_tiny:
        return jobs_uniform(6, 4, 12, shape.vocab)
    return jobs_uniform(256, 100, 1024, shape.vocab)


def large(bench: Bench) -> None:
    """The larger model's, in process."""
    with quick_on_cpu(bench):
        shape = shapes(bench)[0]
        in_process(shape, *ready(shape, bench), bench)


def distance(bench: Bench) -> None:
    """The smaller model's, and with the scheduler in another process, also 2 ms away."""
    with quick_on_cpu(bench):
        shape = shapes(bench)[-1]
        device, jobs = ready(shape, bench)
        beside = in_process(shape, device, jobs, bench)
        # What is in process needs no grpcio.
        from benchmarks.gpu.across_grpc import served

        for delay_ms in (0, 2):
            answer = asyncio.run(served(device, jobs, delay_ms, settle(device)))
            bench.row(
                "crowd", what=f"gRPC, {delay_ms} ms", shape=shape.name, **answer,
                of_in_process=answer["tokens_per_s"] / beside,
            )  # fmt: skip


def in_process(shape: Shape, device: GraphRunner, jobs: list[Job], bench: Bench) -> float:
    """Tokens per second."""
    read, rate = floors(bench)
    crowd = Crowd(device.limits, jobs)
    results = compute_in_process(device, crowd, settle(device))
    tokens_per_s = crowd.tokens / results.seconds
    best = crowd.tokens / floor_s(shape, jobs, device.limits.slots, bench, read, rate)
    bench.row(
        "crowd", what="in process", shape=shape.name, tokens=crowd.tokens,
        seconds=results.seconds, tokens_per_s=tokens_per_s, of_floor=tokens_per_s / best,
    )  # fmt: skip
    return tokens_per_s


def arrivals(bench: Bench) -> None:
    """The smaller model under requests that come one by one, at a share of what a crowd reached.

    Most steps of a busy server have somebody's prompt in them, which a crowd that is admitted at
    once hides.
    """
    with quick_on_cpu(bench):
        shape = shapes(bench)[-1]
        device, _ = ready(shape, bench)
        lengths = (bench.sized(100, 3), bench.sized(400, 6))
        few = jobs_uniform(bench.sized(128, 3), *lengths, shape.vocab)
        crowd = Crowd(device.limits, few)
        at_once = len(few) / compute_in_process(device, crowd, settle(device)).seconds
        jobs = jobs_uniform(bench.sized(384, 4), *lengths, shape.vocab)
        for share in (0.5,) if bench.is_tiny else (0.5, 0.8):
            device.clear()
            crowd = Crowd(device.limits, jobs, due_in_turn(len(jobs), share * at_once))
            computed = compute_in_process(device, crowd, settle(device))
            bench.row(
                "arrivals", what=f"{share:.0%} of a crowd's rate", shape=shape.name,
                requests_per_s=share * at_once, tokens_per_s=crowd.tokens / computed.seconds,
                **waits_of(crowd), **kinds_of(computed.steps),
            )  # fmt: skip


def waits_of(crowd: Crowd) -> dict[str, float]:
    """Milliseconds: to the first token, and between tokens."""
    firsts, gaps = crowd.waits_s()
    found = {}
    for name, waits in (("first_token", firsts), ("gap", gaps)):
        ordered = sorted(waits)
        for percent in (50, 99):
            at = min(len(ordered) - 1, len(ordered) * percent // 100)
            found[f"{name}_p{percent}_ms"] = ordered[at] * 1e3
    return found


def kinds_of(steps: Sequence[StepResult]) -> dict[str, float]:
    """How long a step of decodes took on the device, and one with a prompt; how many had one."""
    timings = [step.timings for step in steps if step.timings.rows]
    kinds = {
        "decode": [each.forward_us for each in timings if each.tokens_computed == each.rows],
        "mixed": [each.forward_us for each in timings if each.tokens_computed > each.rows],
    }
    found = {f"{kind}_ms": median(took) / 1e3 for kind, took in kinds.items() if took}
    return found | {"mixed_share": len(kinds["mixed"]) / max(1, len(timings))}


def watched(bench: Bench) -> None:
    """A smaller crowd under watch: it fails if a step compiles, allocates or waits after Ready."""
    shape = shapes(bench)[-1]
    with quick_on_cpu(bench):
        limits = limits_of(
            shape,
            slots=bench.sized(32, 4),
            context=bench.sized(1024, 32),
            step_tokens=bench.sized(1024, 16),
        )
        device = resident(shape, random_weights(shape, bench), limits, bench, ready=make_ready)
        is_cpu = bench.device.type == "cpu"
        counters: Counters = Uncounted() if is_cpu else CudaCounters(bench.device)
        low, high = bench.sized(50, 4), bench.sized(400, 8)
        jobs = jobs_uniform(bench.sized(64, 4), low, high, shape.vocab)
        crowd = Crowd(limits, jobs)
        results = compute_in_process(Watched(device, counters), crowd, settle(device))
        bench.row(
            "crowd", what="watched", shape=shape.name, tokens=crowd.tokens,
            seconds=results.seconds, tokens_per_s=crowd.tokens / results.seconds,
        )  # fmt: skip


class Uncounted:
    """Of a CPU, to try this script out: nothing ever happens."""

    def memory_asked(self) -> int:
        return 0

    def compiled(self) -> Sequence[str]:
        return ()

    def unwaiting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


def ready(shape: Shape, bench: Bench) -> tuple[GraphRunner, list[Job]]:
    limits = limits_of(
        shape,
        slots=bench.sized(256, 4),
        context=bench.sized(2048, 32),
        step_tokens=bench.sized(4096, 16),
        pool=bench.sized(POOL_TOKENS, 4 * 32),
    )
    weights = random_weights(shape, bench)
    return resident(shape, weights, limits, bench, ready=make_ready), crowd_of(shape, bench)


def floor_s(
    shape: Shape, jobs: Sequence[Job], slots: int, bench: Bench, read: float, rate: float
) -> float:
    """Seconds: as many steps as the longest output has, at least; all products; all KV reads."""
    tokens = sum(len(job.prompt) + job.output for job in jobs)
    steps = max(max(job.output for job in jobs), sum(job.output for job in jobs) // slots)
    weights_s = steps * shape.parameters * bench.dtype.itemsize / read
    compute_s = 2 * shape.parameters * tokens / rate
    contexts = sum(job.output * (len(job.prompt) + job.output / 2) for job in jobs)
    return max(weights_s, compute_s) + contexts * shape.kv_bytes(bench.dtype) / read
