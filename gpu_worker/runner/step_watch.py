"""Launches under watch, for debugging: after Ready none compiles, asks for memory, or waits.

A launch that does any of it is slow once, unseen, and stops the device meanwhile. Watched, it ends
the worker with its reason: `StepViolation` is an AssertionError, about this program and no row.
Reading a result may wait, and is not watched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import torch

from gpu_worker.batch.step_types import (
    AheadRunner,
    BlockPairs,
    Flight,
    RowChanges,
    StepInputs,
    TokenMasks,
)
from gpu_worker.runner.device_streams import HostWaited
from kernels import jit

_ResultT = TypeVar("_ResultT")

# What torch says of a call that waits for the device where none may.
_SYNC_WORDS: Final = "synchronizing CUDA operation"


class StepViolation(AssertionError):
    """A launch did what none may do after Ready."""


class Counters(Protocol):
    """What happened in this process so far."""

    def memory_asked(self) -> int:
        """How many times the device itself was asked for memory: what torch kept is free."""

    def compiled(self) -> Sequence[str]:
        """Kernels that were compiled, or loaded, in their order."""

    def unwaiting(self) -> AbstractContextManager[None]:
        """Inside, a host that waits for the device raises HostWaited."""

    def waiting(self) -> AbstractContextManager[None]:
        """Inside of that, it may."""


class CudaCounters:
    """Of torch and Triton."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compiled: list[str] = []
        jit.watch_compiles(self._compiled.append)

    def memory_asked(self) -> int:
        # Nested: the flat one sorts hundreds of names.
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["num_device_alloc"])

    def compiled(self) -> Sequence[str]:
        return self._compiled

    @contextmanager
    def unwaiting(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        except RuntimeError as error:
            if _SYNC_WORDS not in str(error):
                raise
            raise HostWaited("the host was about to wait for the device") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)


class Watched:
    """The same device; a launch, or a plan's changes, that breaks a rule raises StepViolation."""

    def __init__(self, device: AheadRunner, counters: Counters) -> None:
        self._device = device
        self._counters = counters

    def clear(self) -> None:
        self._device.clear()

    def apply(self, changes: RowChanges, swaps: BlockPairs, copies: BlockPairs) -> None:
        what = (
            f"changes of {len(changes.slots)} rows with {len(swaps)} block swaps and "
            f"{len(copies)} copies"
        )
        self._watch(what, lambda: self._device.apply(changes, swaps, copies))

    def launch(self, step: StepInputs) -> Flight:
        what = f"a step of {step.row_count} rows with {step.token_count} tokens"
        return self._watch(what, lambda: self._device.launch(self._unwatched_masks(step)))

    def _unwatched_masks(self, step: StepInputs) -> StepInputs:
        """Masks wait for the step before: that is what they are for."""
        sampling, masks = step.sampling, step.sampling.masks
        if masks is None:
            return step

        def waited_for() -> TokenMasks:
            with self._counters.waiting():
                return masks()

        return replace(step, sampling=replace(sampling, masks=waited_for))

    def finish(self) -> None:
        self._device.finish()

    def _watch(self, what: str, run: Callable[[], _ResultT]) -> _ResultT:
        asked, compiled = self._counters.memory_asked(), len(self._counters.compiled())
        waited: HostWaited | None = None
        try:
            with self._counters.unwaiting():
                result = run()
        except HostWaited as error:
            waited = error
        found = [f"compiled {kernel}" for kernel in self._counters.compiled()[compiled:]]
        if times := self._counters.memory_asked() - asked:
            found.append(f"asked the device for memory {times} times")
        if waited is not None:
            found.append(str(waited))
        if found:
            raise StepViolation(f"after Ready, {what}: {'; '.join(found)}") from waited
        return result
