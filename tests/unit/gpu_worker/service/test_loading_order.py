"""What a worker looks at first when it starts."""

import errno
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from structlog.testing import capture_logs

from gpu_worker.runner.device_streams import CudaStreams
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.service import loading, process
from gpu_worker.service.loading import PhaseTimer, choose_kernels, load
from gpu_worker.settings import WorkerSettings
from kernels import jit, native
from kernels.cpp import build as binaries
from service_kit.errors import ConfigError
from tests.support import warm_python
from tests.support.random_model import write_random_model


def test_a_wrong_folder_is_refused_before_a_minute_of_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "build", lambda **_: pytest.fail("compiles for nothing"))
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load(WorkerSettings(model=str(tmp_path), device="cpu", threads=1))


async def test_a_taken_port_of_metrics_is_known_before_minutes_of_loading() -> None:
    """And while it loads Prometheus has a page: a target that is down is an alert."""
    pytest.importorskip("opentelemetry.exporter.prometheus", reason="no kaiten[metrics] here")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = WorkerSettings(model="m", metrics_port=taken.getsockname()[1])
        worker = process.WorkerProcess(settings, lambda _: pytest.fail("loads for nothing"))
        with pytest.raises(ConfigError, match="cannot serve metrics on"):
            await worker.start()
        await worker.stop()


def test_host_blocks_are_announced_and_in_the_ready_line(tmp_path: Path) -> None:
    model = str(write_random_model(tmp_path / "tiny", seed=3))
    told = []
    for memory_mb in (0, 0.02):
        loaded = load(
            WorkerSettings(
                model=model,
                device="cpu",
                threads=1,
                slots=2,
                kv_blocks=9,
                kv_host_memory_mb=memory_mb,
            )
        )
        known = process.describe(loaded)
        ready = process._ready_fields(loaded, known, "a:1")
        told.append((known.host_block_count, ready.get("kv_host")))
    # Of 4096 bytes each.
    assert told == [(0, None), (4, "4 blocks")]
    assert isinstance(loaded.runner, EagerRunner)
    loaded.runner.swap_blocks(((0, 12), (12, 1)))


GPU = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            RuntimeError("CUDA error: no kernel image is available\nCompile with"),
            r"phase load: CUDA error: no kernel image is available\); look at nvidia-smi",
        ),
        (
            RuntimeError("Triton Error [CUDA]: the provided PTX was compiled with an unsupported"),
            r"phase load: Triton Error \[CUDA\]: the provided PTX .* driver is new enough",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), r"GPU's memory is full .* \(phase load\)"),
        (
            OSError(errno.ENOMEM, "Cannot allocate memory"),
            r"machine's memory is full .* --weight-d",
        ),
        (MemoryError(), r"this machine's memory is full .* \(phase load\)"),
    ],
)
def test_what_driver_and_memory_say_at_the_start_is_a_sentence(
    fault: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_settings: WorkerSettings, timer: PhaseTimer) -> None:
        timer.running = "load"
        raise fault

    monkeypatch.setattr(loading, "_load", fails)
    with pytest.raises(ConfigError, match=said) as caught:
        load(WorkerSettings(model="m"))
    assert "\n" not in str(caught.value)


def test_a_kernel_that_asks_for_more_than_the_gpu_has_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton's errors are neither torch's nor the driver's."""
    compiler = pytest.importorskip("triton.compiler.compiler", reason="no triton here")
    from triton.runtime.driver import DriverConfig

    driver = DriverConfig()
    utils = SimpleNamespace(get_device_properties=lambda device: {"max_shared_mem": 101376})
    driver.set_active(
        SimpleNamespace(
            utils=utils, get_current_device=lambda: 0, launcher_cls=lambda src, metadata: None
        )
    )
    monkeypatch.setattr("triton.runtime.driver", driver)
    monkeypatch.setattr(compiler, "driver", driver)
    kernel = object.__new__(compiler.CompiledKernel)
    kernel.module, kernel.src, kernel.metadata = None, None, SimpleNamespace(shared=131072)
    said = (
        r"kernel cannot run .*warm_up: .*shared memory, Required: 131072, .* 101376.*--device cpu"
    )
    with pytest.raises(ConfigError, match=said):
        in_warm_up(monkeypatch, kernel._init_handles)


def test_what_the_compiler_says_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLIR's own failure is an error like any other, but for where it comes from."""
    compiler = pytest.importorskip("triton.compiler", reason="no triton here")
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    broken = tmp_path / "broken.ttir"
    broken.write_text("module { tt.nothing }")
    target = GPUTarget("cuda", 90, 32)
    with pytest.raises(RuntimeError) as bare:
        compiler.compile(str(broken), target=target)
    assert type(bare.value) is RuntimeError
    with capture_logs() as logs, pytest.raises(ConfigError) as caught:
        in_warm_up(monkeypatch, lambda: compiler.compile(str(broken), target=target))
    said = str(caught.value)
    assert f"(phase warm_up: RuntimeError: {bare.value})" in said
    assert "\n" not in said
    (told,) = (entry for entry in logs if entry["event"] == "worker.start_failed")
    assert (told["log_level"], type(told["exc_info"])) == ("debug", RuntimeError)


def test_a_cache_that_cannot_be_written_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cache = pytest.importorskip("triton.runtime.cache", reason="no triton here")
    nowhere = tmp_path / "file"
    nowhere.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(nowhere))
    said = r"cannot keep what it compiles .*NotADirectoryError.*; let TRITON_CACHE_DIR and TMP"
    with pytest.raises(ConfigError, match=said):
        in_warm_up(monkeypatch, lambda: cache.FileCacheManager("key"))


def test_an_assembler_that_cannot_be_run_is_a_sentence_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As from a folder from which no program may be run."""
    knobs = pytest.importorskip("triton.knobs", reason="no triton here")
    (tmp_path / "ptxas").write_text("#!/bin/sh\n")
    said = r"cannot run its assembler \(phase warm_up: PermissionError: .*ptxas.*without noexec"
    with pytest.raises(ConfigError, match=said):
        in_warm_up(monkeypatch, lambda: knobs.NvidiaTool.from_path(str(tmp_path / "ptxas")))


def in_warm_up(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> None:
    """A start of which that is a part."""

    def fails(_settings: WorkerSettings, timer: PhaseTimer) -> None:
        timer.running = "warm_up"
        run()

    monkeypatch.setattr(loading, "_load", fails)
    load(WorkerSettings(model="m"))


def test_a_machine_without_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch says it, of more than any address space has."""
    said = (
        r"machine's memory is full .*\(phase warm_up\); take a smaller model or --weight-dtype int8"
    )
    with pytest.raises(ConfigError, match=said):
        in_warm_up(monkeypatch, lambda: torch.empty(1 << 60))


def test_a_gpu_that_is_lost_at_the_start_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host waits for it, as at the end of each recording."""

    def waits() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits())
    streams = object.__new__(CudaStreams)
    streams.device = GPU
    said = r"GPU fails .*phase warm_up: CUDA error: an illegal memory access .*; look at nvidia-smi"
    with pytest.raises(ConfigError, match=said):
        in_warm_up(monkeypatch, streams.finish)


def test_a_fault_of_the_program_keeps_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_settings: WorkerSettings, timer: PhaseTimer) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(loading, "_load", fails)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        load(WorkerSettings(model="m"))


def test_nothing_is_compiled_for_the_cpu_of_a_gpu_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "build", lambda **_: pytest.fail("compiles for nobody"))
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.setattr(jit, "driver_problem", lambda: None)
    for is_deterministic, said in ((False, "not promised"), (True, "the same to the bit")):
        with capture_logs() as logs:
            choose_kernels("auto", GPU, is_deterministic=is_deterministic)
        assert said in logs[-1]["exact"]
    assert not native.available()
    with pytest.raises(ConfigError, match="--native on is for CPUs, on cuda:0"):
        choose_kernels("on", GPU)


def test_a_gpu_without_triton_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a CPU's worker beside such a GPU imports what it needs without it."""
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.setattr(jit, "IS_INSTALLED", False)
    with pytest.raises(ConfigError, match=r"not installed; pip install 'kaiten\[gpu\]', or take"):
        choose_kernels("auto", GPU)
    beside_a_gpu = (
        "import sys, torch; sys.modules['triton'] = None; torch.cuda.is_available = lambda: True; "
        "import gpu_worker.service.loading; from kernels import jit; assert not jit.IS_THERE"
    )
    done = warm_python.run("-c", beside_a_gpu, imports=warm_python.TORCH)
    assert done.code == 0, done.err


def test_kernels_of_chosen_instructions_or_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def build(*, variant: str | None) -> bool:
        asked.append(variant)
        return variant is None

    monkeypatch.setattr(native, "build", build)
    monkeypatch.setattr(native, "reason", lambda: "this processor has no avx2")
    choose_kernels("auto", torch.device("cpu"))
    choose_kernels("on", torch.device("cpu"))
    with pytest.raises(
        ConfigError, match=r"avx2, .*\(this processor has no avx2\); --native auto does without$"
    ):
        choose_kernels("avx2", torch.device("cpu"))
    assert asked == [None, None, "avx2"]


def test_a_start_says_what_its_kernels_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "build", lambda *, variant: native.available())
    for is_there, level, said in ((True, "info", "the same"), (False, "warning", "not promised")):
        monkeypatch.setattr(native, "available", lambda found=is_there: found)
        with capture_logs() as logs:
            choose_kernels("auto", torch.device("cpu"))
        (line,) = logs
        assert (line["event"], line["log_level"]) == ("worker.kernels", level)
        assert said in line["exact"]


def test_every_variant_can_be_asked_for() -> None:
    names = {variant.name for variant in (*binaries.X86, *binaries.ARM)}
    assert {"auto", "on", "off", *names} == set(get_args(WorkerSettings.__annotations__["native"]))


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"PATH": "/nonexistent"}, "Failed to find C compiler"),
        # As without Python.h: it is there, and fails.
        ({"CC": "/bin/false"}, r"false failed: Python's headers \(Python.h\) or libcuda.so"),
        ({"CC": "/nonexistent/cc"}, "No such file or directory"),
    ],
)
def test_no_compiler_is_a_sentence(
    changes: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Triton's own start, on a machine that has a GPU and not all that this needs."""
    pytest.importorskip("triton")
    from triton.backends.nvidia import driver
    from triton.runtime.driver import DriverConfig

    monkeypatch.setattr("triton.runtime.driver", DriverConfig())
    monkeypatch.setattr(driver.CudaDriver, "is_active", lambda: True)
    monkeypatch.setattr(driver, "library_dirs", list)
    monkeypatch.setattr(native, "_state", native._State())
    monkeypatch.delenv("CC", raising=False)
    for name, value in ({"TRITON_CACHE_DIR": str(tmp_path)} | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=rf"Triton cannot launch .*{said}.*gcc python3-dev"):
        choose_kernels("auto", GPU)
