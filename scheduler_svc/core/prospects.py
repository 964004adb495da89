"""Whether a request can ever be served: on any worker, and before its time is over."""

from collections.abc import Collection

from scheduler_svc.core.requests import LiveRequest
from scheduler_svc.core.types import Feature
from scheduler_svc.core.workers import Worker


def why_misfit(workers: Collection[Worker], live: LiveRequest) -> str | None:
    """Why no worker can ever hold its sequences, which all need the same, or None."""
    sequence = live.sequences[0]
    if not workers or any(worker.can_hold(sequence) for worker in workers):
        return None
    able = [worker.kv.places_max for worker in workers if worker.can_do(sequence)]
    if not able:
        needs = ", ".join(need.value for need in Feature if need in live.request.needs)
        return f"the request needs {needs}, and no worker can do all of it"
    return (
        f"prompt and max_tokens need KV for {sequence.kv.places_max} tokens, "
        f"the largest worker holds {max(able)}"
    )


def why_workerless(live: LiveRequest) -> str:
    """No worker came for as long as it waits for one."""
    wait_s = (live.request.worker_wait_ns or 0) / 1e9
    return f"no worker came within {wait_s:g} s, which is as long as a request waits for one"


def first_token_ns(workers: Collection[Worker], live: LiveRequest) -> int:
    """The least that its prompt takes, but for what is cached; 0: who knows. Half of what a
    worker's steps of late say: others may have shared them.
    """
    sequence, least_us = live.sequences[0], []
    for worker in workers:
        if worker.can_hold(sequence):
            hits = worker.kv.lookup(sequence.kv, sequence.max_cached_tokens)
            left, most = len(sequence.tokens) - hits.num_tokens, worker.spec.step_tokens_max
            least_us.append(worker.cost.prefill_us_least(left, most))
    return min(least_us, default=0) * 1000 // 2


def why_hopeless(workers: Collection[Worker], live: LiveRequest, now_ns: int) -> str | None:
    """Why its first token cannot come before its deadline, whatever is done now, or None."""
    deadline_ns = live.request.deadline_ns
    if deadline_ns is None or live.admitted_ns is not None:
        return None
    left_ns, least_ns = deadline_ns - now_ns, first_token_ns(workers, live)
    if least_ns <= left_ns:
        return None
    return (
        f"the prompt of {len(live.request.prompt)} tokens takes {least_ns // 1_000_000} ms or "
        f"more, and only {left_ns // 1_000_000} ms were left until the deadline"
    )
