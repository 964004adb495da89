"""A profile of some steps, on demand: a Chrome trace of what host and device do in them.

torch's profiler listens on the thread that starts it, so all of this but `save` is called on the
compute thread. Steps are marked with their plan in a track of their own, from what the worker
reports of them; on the host's track each plan spans the time that it was run.
"""

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_worker.batch.plans import Plan, StepResult

# A trace of a large batch operator by operator is a megabyte per step.
STEPS_MAX: Final = 256
CPU: Final = torch.device("cpu")
_EVENTS: Final = b'"traceEvents": ['
_BASE: Final = "baseTimeNanoseconds"
_CHUNK_BYTES: Final = 1 << 20
_TRACK: Final = "steps, by plan"


class StepProfile:
    """Of the next `steps` steps, to the end of the plan in which the last of them is."""

    def __init__(self, steps: int, device: torch.device = CPU) -> None:
        """Of a worker on `device`."""
        assert 1 <= steps <= STEPS_MAX
        # Set on the compute thread, once the steps are there.
        self.ended: Future[None] = Future()
        self._left = steps
        self._marks: list[dict[str, Any]] = []
        self._profile = profile(activities=_kinds(device))

    @staticmethod
    def prepare(device: torch.device = CPU) -> None:
        """What the first profile of a process loads, in seconds, of a GPU its library (CUPTI), too.

        On any thread but the computing one: the steps that are profiled need not wait for it then.
        """
        # A profile ends by waiting for the thread's GPU: not for GPU 0, on which this process would
        # then have memory.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            first = profile(activities=_kinds(device))
            first.start()
            first.stop()

    @property
    def is_complete(self) -> bool:
        return self._left <= 0

    def begin(self) -> bool:
        """False: nobody wants it any more."""
        if not self.ended.set_running_or_notify_cancel():
            return False
        self._profile.start()
        return True

    def end(self) -> None:
        """What is missing is not waited for."""
        self._profile.stop()
        self.ended.set_result(None)

    @contextmanager
    def running(self, plan: Plan) -> Iterator[None]:
        """While this plan is run."""
        with record_function(f"plan {plan.plan_id}"):
            yield

    def reporting(self, report: Callable[[StepResult], None]) -> Callable[[StepResult], None]:
        """The same, which also counts the step and marks it."""

        def marking(result: StepResult) -> None:
            self._left -= 1
            self._marks.append(_mark(result, time.time_ns()))
            report(result)

        return marking

    def save(self, path: Path) -> None:
        """Write the trace, as JSON in gzip; after `ended`, on any thread."""
        raw = path.with_suffix(".raw")
        try:
            self._profile.export_chrome_trace(str(raw))
            with raw.open("rb") as source, gzip.open(path, "wb", compresslevel=3) as target:
                head = source.read(_CHUNK_BYTES)
                start, found, rest = head.partition(_EVENTS)
                assert found, "a Chrome trace begins with what it is about"
                target.write(start + found + self._events(start))
                target.write(rest)
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
        finally:
            raw.unlink(missing_ok=True)

    def _events(self, header: bytes) -> bytes:
        """The marks, as the file counts time: microseconds since a moment that it names."""
        about = json.loads(header.rstrip().rstrip(b",") + b"}")
        base_ns = int(about.get(_BASE, 0))
        process = {"pid": os.getpid(), "tid": _TRACK}
        marks = [{**mark, **process, "ts": (mark["ts"] - base_ns) / 1000} for mark in self._marks]
        return b"".join(json.dumps(mark).encode() + b",\n" for mark in marks)


def _kinds(device: torch.device) -> list[ProfilerActivity]:
    kinds = [ProfilerActivity.CPU]
    return [*kinds, ProfilerActivity.CUDA] if device.type == "cuda" else kinds


def _mark(result: StepResult, now_ns: int) -> dict[str, Any]:
    """As long as it was computed, and to when that was reported."""
    timings = result.timings
    took_us = timings.forward_us + timings.sample_us
    return {
        "ph": "X",
        "cat": "step",
        "name": f"plan {result.plan_id} step {result.step}",
        "ts": now_ns - took_us * 1000,
        "dur": took_us,
        "args": {
            "plan_id": result.plan_id,
            "step": result.step,
            "rows": timings.rows,
            "tokens": timings.tokens_computed,
            "forward_us": timings.forward_us,
            "sample_us": timings.sample_us,
            "wait_us": timings.wait_us,
        },
    }
