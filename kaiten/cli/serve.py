"""`kaiten serve`: the whole architecture on one machine, one process each, under one supervisor."""

import fcntl
import io
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import grpc

from kaiten.cli import packages, ready
from kaiten.cli.display import TerminalDisplay
from kaiten.console import console
from kaiten.local.stack import ServeOptions, planned_stack
from kaiten.local.supervisor import Supervisor
from kaiten.start_error import StartError

DISK_MB_MIN: Final = 32


async def serve(options: ServeOptions) -> int:
    """Run until asked to stop; the exit code. StartError when it cannot start.

    Logs, stores and archives hold prompts: what this process and its children make is its user's.
    """
    os.umask(0o077)
    packages.require("serve")
    with (
        _only_one(options.data_dir),
        TerminalDisplay() as display,
        planned_stack(options) as stack,
    ):

        async def on_ready(took_s: Mapping[str, float]) -> None:
            display.all_ready()
            out = console(stderr=False, is_unfailing=True)
            try:
                facts = await ready.ask(stack)
            except grpc.aio.AioRpcError as error:
                raise StartError(f"the stack does not answer: {error.details()}") from error
            has_keys = options.gateway.api_keys_file is not None
            ready.show(out, ready.rows(stack, facts, took_s, has_keys=has_keys))
            out.print(
                ready.snippets(
                    stack,
                    facts.model.name,
                    can_chat=options.model.can_chat,
                    has_keys=has_keys,
                ),
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            out.file.flush()

        supervisor = Supervisor(stack, display)
        supervisor.stop_by_signals()
        return await supervisor.run(on_ready)


@contextmanager
def _only_one(data_dir: Path) -> Iterator[None]:
    """Two stacks on one data directory would corrupt each other's store."""
    with _lock_file(data_dir) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            holder = lock.read(20).decode(errors="replace").strip()
            raise StartError(
                f"another `kaiten serve` (process {holder}) is using {data_dir}",
                "stop it, or choose another folder with --data-dir",
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n".encode())
        yield


def _lock_file(data_dir: Path) -> io.FileIO:
    """The open lock of a folder that can be written and has room for a store."""
    fix = "choose another folder with --data-dir"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        free_mb = shutil.disk_usage(data_dir).free / 1e6
        if free_mb < DISK_MB_MIN:
            raise StartError(
                f"{data_dir} has {free_mb:.1f} MB free; the store and the logs need {DISK_MB_MIN}",
                f"free some, or {fix}",
            )
        return (data_dir / "lock").open("ab+", buffering=0)
    except FileExistsError:
        raise StartError(f"{data_dir} is no folder", fix) from None
    except OSError as error:
        raise StartError(f"cannot write to {data_dir}: {error.strerror}", fix) from error
