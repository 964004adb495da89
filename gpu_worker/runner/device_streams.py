"""What an accelerator does beside computing: a stream of its own, pinned copies, graphs.

On a CPU each is the plain thing, so that everything built on them runs, and is tested, without a
GPU: a copy is made at once, and a graph is the call that it would have recorded.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from gpu_worker.batch.step_types import DeviceLost

# torch.cuda.set_sync_debug_mode("error").
_REFUSES_TO_WAIT: Final = 2


class NotRecorded(Exception):
    """What was launched cannot be recorded here; launched one by one it can be."""


class HostWaited(Exception):
    """The host was about to wait for the device where it must not."""


class Fetch(Protocol):
    """Tensors on their way to the host."""

    @property
    def is_done(self) -> bool:
        """Whether `wait` would not wait."""

    def wait(self) -> int:
        """Until they are there; the microseconds that the device computed since `begun`.

        Raises DeviceLost.
        """


class DeviceStreams(Protocol):
    @property
    def device(self) -> torch.device: ...

    def take_thread(self) -> None:
        """The calling thread computes from now on; CUDA has a device by thread, at first GPU 0."""

    def computing(self) -> AbstractContextManager[None]:
        """What is launched inside goes to the worker's own stream, in order, and keeps no grads."""

    def host_buffer(self, size_bytes: int) -> Tensor:
        """Memory of the host that the device copies from and to by itself, as bytes."""

    def pin(self, memory: Tensor) -> None:
        """From now on the device copies from and to this memory of the host by itself.

        For as long as these streams are there.
        Unlike a `host_buffer` it may be large: torch would take the next power of two.
        RuntimeError: the driver refuses.
        """

    def mark(self) -> Callable[[], None]:
        """A function that waits for everything launched up to now."""

    def finish(self) -> None:
        """Wait for everything launched so far, on any stream. Raises DeviceLost."""

    def begun(self) -> Any:
        """The moment when what is launched next begins, for `fetch`."""

    def fetch(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], begun: Any) -> Fetch:
        """Begin to copy each to its target; what is launched afterwards does not wait for it."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that launches at once all that `run` launches, over the same tensors.

        Raises NotRecorded.
        """


class CpuStreams:
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def take_thread(self) -> None:
        pass

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> None:
        pass

    def mark(self) -> Callable[[], None]:
        return lambda: None

    def finish(self) -> None:
        pass

    def begun(self) -> int:
        return time.perf_counter_ns()

    def fetch(self, tensors: Sequence[Tensor], targets: Sequence[Tensor], begun: int) -> Fetch:
        elapsed_us = (time.perf_counter_ns() - begun) // 1000
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor)
        return _Fetched(elapsed_us)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        return run


class CudaStreams:
    """One compute stream and one for copies to the host, both of the thread that computes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._compute = _stream(device)
        self._back = _stream(device)
        # One for all graphs: they run one after the other.
        self._graph_pool: Any = torch.cuda.graph_pool_handle()
        self._broken_off: list[torch.cuda.CUDAGraph] = []
        self._pinned: list[Tensor] = []

    def take_thread(self) -> None:
        # Otherwise every return from `computing` would make this thread a context on GPU 0, which
        # takes hundreds of megabytes from the worker there.
        torch.cuda.set_device(self.device)

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.inference_mode(), torch.cuda.stream(self._compute):
            yield

    def host_buffer(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: Tensor) -> None:
        if not memory.nbytes:
            return
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        self._pinned.append(memory)
        # What lies in the same place later could not be pinned. A process that ends need not care.
        given_back = weakref.finalize(memory, driver.cudaHostUnregister, memory.data_ptr())
        given_back.atexit = False

    def mark(self) -> Callable[[], None]:
        event = _event()
        event.record(self._compute)
        return partial(_wait_for, event)

    def finish(self) -> None:
        with losing():
            torch.cuda.synchronize(self.device)

    def begun(self) -> torch.cuda.Event:
        event = _event(is_timed=True)
        event.record(self._compute)
        return event

    def fetch(
        self, tensors: Sequence[Tensor], targets: Sequence[Tensor], begun: torch.cuda.Event
    ) -> Fetch:
        ended = _event(is_timed=True)
        ended.record(self._compute)
        self._back.wait_event(ended)
        with torch.cuda.stream(self._back):
            for target, tensor in zip(targets, tensors, strict=True):
                target.copy_(tensor, non_blocking=True)
            done = _event()
            done.record(self._back)
        return _Fetching(tensors, done, begun, ended)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        # Once before: what compiles, loads or allocates for good must not be recorded.
        run()
        self.finish()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._compute):
                run()
        except RuntimeError as error:
            self._give_up(graph)
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # A device that is lost says so here.
            self.finish()
            raise NotRecorded(str(error).partition("\n")[0]) from error
        return graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """A recording that broke off is over, also for torch's allocator.

        Otherwise it goes on as if one were under way: it gives nothing of what it keeps back to a
        device that is full, and in later recordings it asks this graph, which must be there then.
        """
        self._broken_off.append(graph)
        # Where torch has noticed by itself, it says so.
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self.device.index, self._graph_pool)


class _Fetched:
    def __init__(self, elapsed_us: int) -> None:
        self._elapsed_us = elapsed_us
        self.is_done = True

    def wait(self) -> int:
        return self._elapsed_us


class _Fetching:
    def __init__(
        self,
        sources: Sequence[Tensor],
        done: torch.cuda.Event,
        begun: torch.cuda.Event,
        ended: torch.cuda.Event,
    ) -> None:
        # Their memory must not be given to others while it is read on another stream.
        self._sources = sources
        self._done, self._begun, self._ended = done, begun, ended

    @property
    def is_done(self) -> bool:
        with losing():
            return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> int:
        with losing():
            _wait_for(self._done)
            return int(self._begun.elapsed_time(self._ended) * 1000)


@contextmanager
def losing() -> Iterator[None]:
    """Inside the host only waits: what is raised there is about what the device computed."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise DeviceLost(
            f"the GPU failed while it computed ({reason}); this process cannot use it again and "
            "ends, so that its requests are computed elsewhere; start the worker anew"
        ) from error


def _wait_for(event: torch.cuda.Event) -> None:
    """Where torch refuses to wait, it would still wait for events: not so here."""
    is_watched = torch.cuda.get_sync_debug_mode() == _REFUSES_TO_WAIT
    if is_watched and not event.query():  # type: ignore[no-untyped-call]
        raise HostWaited("the host was about to wait for a copy")
    event.synchronize()


# torch leaves these two without types.
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _event(*, is_timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=is_timed)  # type: ignore[no-untyped-call]


def streams_for(device: torch.device) -> DeviceStreams:
    return CudaStreams(device) if device.type == "cuda" else CpuStreams()
