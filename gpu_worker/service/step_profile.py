"""A profile of some steps, on demand: a Chrome trace of what host and device do in them.

torch's profiler listens on the thread that starts it, so all of `StepProfile` but `prepare` and
`save` is called on the compute thread. Steps are marked with their plan in a track of their own,
from what the worker reports of them; on the host's track each plan spans the time that it was run.
"""

import asyncio
import gzip
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, Final

import structlog
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpu_worker.batch.plans import Plan, StepResult
from gpu_worker.runner.engine import Engine
from service_kit.errors import Overloaded, Unavailable

log = structlog.get_logger()

# A trace of a large batch operator by operator is a megabyte per step.
STEPS_MAX: Final = 256
CPU: Final = torch.device("cpu")
_EVENTS: Final = b'"traceEvents": ['
_BASE: Final = "baseTimeNanoseconds"
_CHUNK_BYTES: Final = 1 << 20
# Of a trace, per message.
PIECE_BYTES: Final = 1 << 20
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
        """False: it cannot, or nobody wants it any more. Then it has ended."""
        if not self.ended.set_running_or_notify_cancel():
            return False
        return self._tried(self._profile.start)

    def end(self) -> None:
        """What is missing is not waited for."""
        if self._tried(self._profile.stop):
            self.ended.set_result(None)

    def _tried(self, call: Callable[[], None]) -> bool:
        """A profiler that refuses is told to whoever asked for it: the steps go on."""
        try:
            call()
        except RuntimeError as error:
            self.ended.set_exception(Unavailable(f"torch's profiler refuses: {error}"))
            return False
        return True

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


class Profiling:
    """Profiles of one worker, one at a time: torch has one profiler per process, and a session of
    it beside another takes the process along. So what was begun is brought to its end, whoever it
    was for and however soon they left.
    """

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        self._taking: asyncio.Task[IO[bytes] | None] | None = None

    async def pieces(self, steps: int) -> AsyncIterator[bytes]:
        """Of the trace of the next so many steps, JSON in gzip. Who goes away ends it with those it
        has. Overloaded: one is being taken already; Unavailable: torch's profiler refuses.
        """
        if self._taking is not None and not self._taking.done():
            raise Overloaded("a profile is being taken already", 1.0, 1)
        has_left = asyncio.Event()
        taking = self._taking = asyncio.create_task(self._take(steps, has_left))
        taking.add_done_callback(_heard)
        try:
            trace = await asyncio.shield(taking)
            assert trace is not None
            with trace:
                while piece := trace.read(PIECE_BYTES):
                    yield piece
        finally:
            has_left.set()

    async def _take(self, steps: int, has_left: asyncio.Event) -> IO[bytes] | None:
        """None: it was left."""
        await asyncio.to_thread(StepProfile.prepare, self._device)
        profile = StepProfile(steps, self._device)
        log.info("profile.begun", steps=steps)
        self._engine.profile(profile)
        ended = asyncio.wrap_future(profile.ended)
        leaving = asyncio.create_task(has_left.wait())
        await asyncio.wait((ended, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self._engine.end_profile(profile)
        leaving.cancel()
        await ended
        log.info("profile.ended", steps=steps)
        return None if has_left.is_set() else await asyncio.to_thread(_saved, profile)


def _saved(profile: StepProfile) -> IO[bytes]:
    """In a file without a name, which ends with whoever holds it."""
    with tempfile.TemporaryDirectory(prefix="kaiten-") as folder:
        path = Path(folder) / "trace.json.gz"
        profile.save(path)
        return path.open("rb")


def _heard(taking: asyncio.Task[IO[bytes] | None]) -> None:
    """Of one whose client has left nobody else hears how it ended."""
    if not taking.cancelled():
        taking.exception()


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
