"""What fails while a worker starts, as a sentence that says what to change."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog
import torch

from gpu_worker.batch.step_types import DeviceLost
from kernels import jit
from service_kit.errors import ConfigError

log = structlog.get_logger()

# Of a compiler's words; all of them are in the log.
_REASON_MAX: Final = 300


@contextmanager
def in_sentences(phase: Callable[[], str]) -> Iterator[None]:
    """Inside, what memory, a GPU, its driver and Triton say is a ConfigError: what to change.

    `phase` is the one that runs. Where it was said is in the log, at level debug.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        if (said := _sentence_of(error, phase())) is None:
            raise
        log.debug("worker.start_failed", phase=phase(), exc_info=error)
        raise ConfigError(said) from error


def _sentence_of(error: Exception, phase: str) -> str | None:
    """None: it is about this program."""
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"the GPU's memory is full while the worker starts (phase {phase}); lower "
            "--gpu-memory-share, --step-tokens or --slots, take a smaller model or a larger "
            "device, or end what else uses it"
        )
    if _is_memory_full(error):
        return (
            f"this machine's memory is full while the worker starts (phase {phase}); take a "
            "smaller model or --weight-dtype int8, lower --kv-memory-mb, or end what else uses it"
        )
    # What was only waited for, `device_streams.losing` calls lost, of the same words.
    cause = error.__cause__ if isinstance(error, DeviceLost) and error.__cause__ else error
    reason = str(cause).strip().partition("\n")[0]
    # torch's and Triton's words for what the driver says.
    if isinstance(error, DeviceLost) or (isinstance(cause, RuntimeError) and "CUDA" in reason):
        return (
            f"the GPU fails while the worker starts (phase {phase}: {reason}); look at nvidia-smi "
            f"and whether the driver is new enough for torch {torch.__version__}, or take --device "
            "cpu"
        )
    return _of_compiler(error, phase) if jit.is_compilers(error) else None


def _is_memory_full(error: Exception) -> bool:
    """Of the host, as Python, the kernel and torch say so."""
    is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or is_refused or "DefaultCPUAllocator" in str(error)


def _of_compiler(error: Exception, phase: str) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_MAX]
    if isinstance(error, OSError) and jit.is_of_a_program(error):
        return (
            f"Triton cannot run its assembler (phase {phase}: {reason}); let programs be run from "
            "the folder in which it is installed (mounted without noexec), or let "
            "TRITON_PTXAS_PATH name a ptxas that this user can run"
        )
    if isinstance(error, OSError):
        return (
            f"Triton cannot keep what it compiles (phase {phase}: {reason}); let TRITON_CACHE_DIR "
            "and TMPDIR be folders with room that this user can write"
        )
    return (
        f"a kernel cannot run on the GPU (phase {phase}: {reason}); kaiten's are tried for "
        "processors 8.0, 9.0 and 10.0: take --device cpu, another GPU, or the Triton that this "
        "release is tested with (--log-level debug tells all that was said)"
    )
