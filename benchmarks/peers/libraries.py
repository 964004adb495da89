"""Peers that are libraries: a script of this folder, in the Python that has the package."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.peers.setting import (
    RUN_S_MAX,
    Answers,
    PeerError,
    Runner,
    Setting,
    quiet,
    warm_jobs,
)
from kaiten.bench.outcomes import Frame, Outcome
from kaiten.bench.workload import Job

HERE: Final = Path(__file__).parent


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
            start_s = _run_script(command, Path(folder) / "log", quiet(setting))
            found = json.loads(out.read_text())
        stories = zip(setting.jobs, found["stories"], strict=True)
        return Answers(
            outcomes=[_told(job, story) for job, story in stories],
            start_s=start_s,
            says=mode,
            tokens=found["tokens"],
            cpu_s=found["cpu_s"],
        )

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
        env=quiet(setting),
    )
    if done.returncode:
        raise PeerError(f"the export to OpenVINO failed:\n{done.stderr[-1500:]}")
    return unfinished.rename(folder)


def _write_jobs(folder: Path, jobs: Sequence[Job]) -> Path:
    def told(some: Sequence[Job]) -> list[dict[str, object]]:
        return [{"prompt": job.prompt, "output_tokens": job.output_tokens} for job in some]

    path = folder / "jobs.json"
    path.write_text(json.dumps({"warm": told(warm_jobs(jobs)), "jobs": told(jobs)}))
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
