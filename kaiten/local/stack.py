"""The children of `kaiten serve`: which processes, told what, started and stopped in what order."""

import math
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

from kaiten.local import services, store
from kaiten.local.child import ChildSpec
from kaiten.local.health import Health
from kaiten.local.model_source import ModelSource
from kaiten.local.part_options import GatewayOptions, WorkerOptions, flags_of
from kaiten.local.ports import LOOPBACK, claim
from kaiten.local.private import private_folder, remove_own, socket_folder, unix_address
from kaiten.local.scheduling import Scheduling
from kaiten.public_tls import PublicTls
from kaiten.start_error import StartError

# The first to be there leads. The other stands by, at 45 MB: who leads is killed, and nobody waits
# for a process to start or for a lease to run out.
SCHEDULERS: Final = ("scheduler", "standby")
CGROUPS: Final = Path("/sys/fs/cgroup")
# Of a worker with the shipped model: with 1,200 it could begin no thread.
ADDRESSES_MB_MIN: Final = 1500
# A slip of the finger: they would all be started.
WORKERS_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What the user asked for. None leaves a service its own default."""

    model: ModelSource
    data_dir: Path
    host: str = LOOPBACK
    grpc_port: int = 50051
    http_port: int = 8000
    workers: int = 1
    redis_url: str | None = field(default=None, repr=False)
    cell: str = "0"
    log_level: str | None = None
    # Prometheus pages of schedulers and workers, on this port and those after it; 0: any.
    metrics_port: int | None = None
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    gateway: GatewayOptions = field(default_factory=GatewayOptions)
    scheduling: Scheduling = field(default_factory=Scheduling)

    def __post_init__(self) -> None:
        """StartError for what no service would refuse by itself."""
        if not 1 <= self.workers <= WORKERS_MAX:
            raise StartError(f"--workers must be in [1, {WORKERS_MAX}], got {self.workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The plan of a run: children by stage of starting, and where to reach them.

    Children of one stage start together; those of one group of `stop_order` stop together: first
    who takes requests in, last who keeps them.
    """

    stages: tuple[tuple[ChildSpec, ...], ...]
    stop_order: tuple[tuple[str, ...], ...]
    redis_url: str = field(repr=False)
    grpc_address: str
    http_url: str
    worker_addresses: tuple[str, ...]
    # Either may lead; the other stands by.
    scheduler_addresses: tuple[str, ...]
    # On loopback, of the schedulers, then of the workers; none: nobody asked.
    metrics_ports: tuple[int, ...] = ()
    # Both ports' TLS, if they have any; and the gateway for this user, without it.
    tls: PublicTls | None = None
    private_address: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inner:
    """Where a part listens that only parts talk to; its page for Prometheus, if it has one."""

    name: str
    socket: Path
    metrics_port: int | None

    @property
    def address(self) -> str:
        return unix_address(self.socket)

    def flags(self) -> tuple[str, ...]:
        return _flags({"--grpc-socket": self.socket, "--metrics-port": self.metrics_port})


class _Door(NamedTuple):
    """Where the gateway listens: for everybody, and for this user."""

    grpc_port: int
    http_port: int
    socket: Path


@contextmanager
def planned_stack(options: ServeOptions) -> Iterator[Stack]:
    """A plan whose ports and sockets stay ours while its children come and go.

    StartError when a port is taken or no store can be had.
    """
    _require_addresses()
    with ExitStack() as held:
        grpc_port = held.enter_context(claim(options.host, options.grpc_port, "--grpc-port"))
        http_port = held.enter_context(claim(options.host, options.http_port, "--http-port"))
        private_folder(options.data_dir / "logs")
        sockets = socket_folder(options.data_dir / "run")
        held.callback(remove_own, sockets, os.getpid())
        names = (*SCHEDULERS, *(f"worker-{index}" for index in range(options.workers)))
        inner = [
            _Inner(
                name=name,
                socket=sockets / f"{name}.sock",
                metrics_port=_metrics_port(options, index, held),
            )
            for index, name in enumerate(names)
        ]
        door = _Door(grpc_port.number, http_port.number, sockets / "gateway.sock")
        yield _plan(options, door, inner, sockets / "store.sock")


def _require_addresses() -> None:
    """With fewer gRPC ends this process without a sentence, and torch its own."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY and allowed < ADDRESSES_MB_MIN * 1_000_000:
        raise StartError(
            f"this process may have {allowed // 1_000_000} MB of addresses (ulimit -v); a stack"
            f" needs {ADDRESSES_MB_MIN} for each of its parts, and more for a larger model",
            "ulimit -v unlimited",
        )


def _metrics_port(options: ServeOptions, index: int, held: ExitStack) -> int | None:
    """Of the schedulers and workers in turn."""
    first = options.metrics_port
    if first is None:
        return None
    return held.enter_context(claim(LOOPBACK, first and first + index, "--metrics-port")).number


def _plan(options: ServeOptions, door: _Door, inner: Sequence[_Inner], socket: Path) -> Stack:
    """`inner`: of the schedulers, then of the workers. `socket`: of a store of ours."""
    stores, redis_url = _store(options, socket)
    of_schedulers, of_workers = inner[: len(SCHEDULERS)], inner[len(SCHEDULERS) :]
    scheduler_addresses = tuple(place.address for place in of_schedulers)
    schedulers = tuple(_scheduler(options, redis_url, place) for place in of_schedulers)
    workers = tuple(_worker(options, place, scheduler_addresses) for place in of_workers)
    services = (
        *schedulers,
        *workers,
        _gateway(options, redis_url, door),
    )
    worker_names = tuple(worker.name for worker in workers)
    tls = PublicTls.of(options.gateway.tls_cert, options.gateway.tls_client_ca)
    host = _reachable(options.host)
    host = host if tls is None else tls.name_for(host)
    return Stack(
        stages=(stores, services) if stores else (services,),
        stop_order=(("gateway",), SCHEDULERS, worker_names, ("store",)),
        redis_url=redis_url,
        grpc_address=f"{host}:{door.grpc_port}",
        http_url=f"{'https' if tls else 'http'}://{host}:{door.http_port}",
        tls=tls,
        private_address=unix_address(door.socket),
        worker_addresses=tuple(place.address for place in of_workers),
        scheduler_addresses=scheduler_addresses,
        metrics_ports=tuple(place.metrics_port for place in inner if place.metrics_port),
    )


def core_count(cgroups: Path = CGROUPS) -> int:
    """Cores this process has whole, as a worker counts them (`gpu_worker/container.py`)."""
    has_affinity = hasattr(os, "sched_getaffinity")
    count = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, int(min(count, _cpu_quota(cgroups))))


def _cpu_quota(folder: Path) -> float:
    """Of cores, by cgroups of version 2 or 1; infinite: there is none."""
    before = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    files = [folder / "cpu.max", *(folder / "cpu" / name for name in before)]
    told = " ".join(path.read_text() for path in files if path.is_file()).split()
    return int(told[0]) / int(told[1]) if told and told[0].isdigit() else math.inf


def _store(options: ServeOptions, socket: Path) -> tuple[tuple[ChildSpec, ...], str]:
    """Our own server, unless there is a URL of another. One folder per model, by what it holds:
    requests that were accepted for one model must not be resumed by another."""
    if options.redis_url is not None:
        return (), options.redis_url
    folder = private_folder(_folder(options, "store"))
    spec = ChildSpec(
        name="store",
        command=store.command(store.choose_program(), folder, socket),
        log_path=_log(options, "store"),
        folders=(folder, socket.parent),
        is_ready=partial(store.is_ready, socket),
        is_alive=partial(store.answers, socket),
    )
    return (spec,), f"unix://{socket}"


def _scheduler(options: ServeOptions, redis_url: str, place: _Inner) -> ChildSpec:
    archive = _folder(options, "archive")
    if archive.is_dir():
        # Made by an earlier version, it may be open to others.
        private_folder(archive)
    return _service(
        options,
        place.name,
        place.socket,
        "scheduler_svc",
        *("--cell", options.cell),
        *place.flags(),
        *_flags(options.scheduling.flags()),
        *options.scheduling.archive_flags(archive),
        environ={"KAITEN_SCHEDULER_REDIS_URL": redis_url},
    )


def _worker(
    options: ServeOptions, place: _Inner, scheduler_addresses: tuple[str, ...]
) -> ChildSpec:
    given = flags_of(options.worker)
    if options.worker.threads is None and options.workers > 1:
        given |= {"--threads": max(1, core_count() // options.workers)}
    return _service(
        options,
        place.name,
        place.socket,
        "gpu_worker",
        *("--model", str(options.model.folder)),
        *("--served-model-name", options.model.name),
        *("--scheduler", ",".join(scheduler_addresses)),
        *place.flags(),
        *_flags(given),
    )


def _gateway(options: ServeOptions, redis_url: str, door: _Door) -> ChildSpec:
    """Asked by its socket whether it is well: the ports may want a certificate that we do not have,
    and be called by a name that does not lead here."""
    return _service(
        options,
        "gateway",
        door.socket,
        "gateway",
        *("--cell", options.cell),
        *("--model", str(options.model.folder), "--served-model-name", options.model.name),
        *("--grpc-host", options.host, "--grpc-port", str(door.grpc_port)),
        *("--http-host", options.host, "--http-port", str(door.http_port)),
        *("--grpc-socket", str(door.socket)),
        *_flags(flags_of(options.gateway)),
        environ={"KAITEN_GATEWAY_REDIS_URL": redis_url},
    )


def _service(
    options: ServeOptions,
    name: str,
    socket: Path,
    module: str,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
) -> ChildSpec:
    told = {"--log-level": options.log_level}
    health = Health(unix_address(socket))
    return ChildSpec(
        name=name,
        command=(*services.command(module), *arguments, *_flags(told)),
        environ=services.environ() | dict(environ or {}),
        log_path=_log(options, name),
        folders=(socket.parent,),
        is_ready=health.is_serving,
        is_alive=health.answers,
    )


def _flags(given: Mapping[str, object]) -> tuple[str, ...]:
    """Those that somebody gave; a switch has no value."""
    named = ((flag, value) for flag, value in given.items() if value is not None)
    words = ((flag,) if value is True else (flag, str(value)) for flag, value in named)
    return tuple(chain.from_iterable(words))


def _folder(options: ServeOptions, kind: str) -> Path:
    """One per model, by what it holds."""
    return options.data_dir / f"{kind}-{_slug(options.model.name)}-{options.model.digest[:12]}"


def _log(options: ServeOptions, name: str) -> Path:
    return options.data_dir / "logs" / f"{name}.log"


def _slug(name: str) -> str:
    """What people recognise of a name, short enough for a folder's."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:64].strip(".-") or "model"


def _reachable(host: str) -> str:
    """An address to connect to for one that was bound; wildcards are reached by loopback."""
    if host in ("0.0.0.0", "::"):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host
