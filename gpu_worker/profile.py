"""`kaiten profile`: a Chrome trace of a worker's next steps, while it serves.

    kaiten profile --steps 20                          the first worker of `kaiten serve` here
    kaiten profile --worker worker-1 --out b.json.gz
    kaiten profile --worker gpu-7:50053 --peer-credential-file FILE

Perfetto (https://ui.perfetto.dev) and chrome://tracing open it. Nothing is profiled until steps
are computed: a worker without requests is waited for.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc
from pydantic import Field

from kaiten.v1.worker_service_pb2 import ProfileRequest
from kaiten.v1.worker_service_pb2_grpc import WorkerServiceStub
from service_kit.addresses import problem_of, unix_address
from service_kit.errors import ConfigError
from service_kit.peers import Peers, PeerSettings
from service_kit.settings import load

_OPTIONS: Final = (("grpc.max_receive_message_length", 4 << 20),)


class ProfileSettings(PeerSettings):
    """A Chrome trace of a worker's next steps, on any device."""

    steps: int = Field(default=20, ge=1, le=256, description="how many; to the end of their plan")
    worker: str = Field(
        default="worker-0",
        description="which one of `kaiten serve`, or any worker's address: host:port, unix:/path",
    )
    data_dir: Path = Field(default=Path(".kaiten"), description="of that `kaiten serve`")
    out: Path = Field(default=Path("trace.json.gz"), description="the file to write")
    wait_s: float = Field(default=60.0, gt=0, description="for so many steps, at most")


def main(argv: Sequence[str] | None = None) -> int:
    """0: the file is there. 2: it is not, for a reason that is told."""
    try:
        settings = load(ProfileSettings, "profile", argv)
        count = write_trace(settings)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except grpc.RpcError as error:
        hint = ""
        if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
            hint = f" (within {settings.wait_s:g} s there were not {settings.steps} steps)"
        sys.stderr.write(f"{address_of(settings)}: {error.details()}{hint}\n")
        return 2
    sys.stdout.write(f"{settings.out}: {count} bytes; open it at https://ui.perfetto.dev\n")
    return 0


def write_trace(settings: ProfileSettings) -> int:
    """Its bytes. Half of a trace is none: the file is there when all of it has come."""
    peers, count = Peers.of(settings), 0
    draft = settings.out.with_name(f".{settings.out.name}.part")
    try:
        with peers.blocking_channel(address_of(settings), _OPTIONS) as channel:
            proof = peers.proof()
            call = WorkerServiceStub(channel).Profile(
                ProfileRequest(steps=settings.steps),
                timeout=settings.wait_s,
                metadata=proof.metadata,
            )
            with draft.open("wb") as file:
                for response in proof.blocking_stream(call):
                    count += file.write(response.piece)
        draft.replace(settings.out)
    finally:
        draft.unlink(missing_ok=True)
    return count


def address_of(settings: ProfileSettings) -> str:
    """ConfigError: it is neither an address nor a worker that runs here."""
    if ":" in settings.worker:
        if rule := problem_of(settings.worker):
            raise ConfigError(f"--worker {rule}, got {settings.worker!r}")
        return settings.worker
    socket = settings.data_dir.absolute() / "run" / f"{settings.worker}.sock"
    if not socket.exists():
        raise ConfigError(
            f"--worker {settings.worker}: there is no {socket}; is `kaiten serve` running, and from"
            " which folder (--data-dir)? Or give the address that the worker's log says when ready"
        )
    return unix_address(socket)


if __name__ == "__main__":
    sys.exit(main())
