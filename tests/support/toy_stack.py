"""A supervisor over stand-in programs: `python -m tests.support.toy_stack FOLDER [NAME=MODE…]`.

It says on stdout what the supervisor's display is told, one line each; with `display=terminal` as
`kaiten serve` says it; with `asked=NAME` it waits, all ready, for another process of that name;
with `idle=S` who is started again may do nothing for that long. A stand-in writes its pid to
FOLDER/NAME.pid when it is ready, and its name to FOLDER/ended when it ends politely.
"""

import asyncio
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from kaiten.local.child import ChildSpec
from kaiten.local.stack import Stack
from kaiten.local.supervisor import Display, Supervisor
from kaiten.start_error import StartError

STAND_IN = """
import os, pathlib, signal, sys
folder, name, mode = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
# Waited for, never handled: a handler that takes a lock may find it taken by what it interrupts.
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if mode == "broken":
    sys.exit("the model is unreadable")
is_again = (folder / f"{name}.pid").exists()
if mode != "never-ready" and not (mode == "once" and is_again):
    (folder / f"{name}.tmp").write_text(str(os.getpid()))
    (folder / f"{name}.tmp").rename(folder / f"{name}.pid")
signal.sigwait({signal.SIGHUP if mode == "stubborn" else signal.SIGTERM})
with (folder / "ended").open("a") as ended:
    ended.write(name + "\\n")
"""
NAMES = ("store", "scheduler", "worker-0", "worker-1", "gateway")


def toy_stack(folder: Path, modes: Mapping[str, str]) -> Stack:
    specs = {
        name: ChildSpec(
            name=name,
            # It needs nothing of what is installed, nor to look for it.
            command=(sys.executable, "-I", "-S", "-c", STAND_IN, str(folder), name, mode),
            log_path=folder / "logs" / f"{name}.log",
            folders=(folder / "files",),
            is_ready=partial(is_up, folder / f"{name}.pid"),
            is_alive=partial(runs, folder / f"{name}.pid"),
        )
        for name, mode in ((name, modes.get(name, "plain")) for name in NAMES)
    }
    return Stack(
        stages=((specs["store"],), tuple(specs[name] for name in NAMES[1:])),
        stop_order=(("gateway",), ("scheduler",), ("worker-0", "worker-1"), ("store",)),
        redis_url="",
        grpc_address="",
        http_url="",
        worker_addresses=(),
        scheduler_addresses=(),
    )


async def is_up(pid_file: Path) -> bool:
    return process_is_up(pid_file)


async def runs(pid_file: Path) -> bool:
    """A stopped one answers nobody."""
    return not process_is_stopped(pid_file)


def process_is_stopped(pid_file: Path) -> bool:
    # asyncio waits for a process by a thread: it has gone before the supervisor is told so.
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(pid_file.read_text())).status() == psutil.STATUS_STOPPED
    return False


def process_is_up(pid_file: Path) -> bool:
    return pid_file.exists() and psutil.pid_exists(int(pid_file.read_text()))


class LineDisplay:
    """Everything as a line on stdout."""

    def starting(self, name: str) -> None:
        say("starting", name)

    def progress(self, name: str, log: str) -> None:
        pass

    def ready(self, name: str, seconds: float) -> None:
        assert seconds >= 0
        say("ready", name)

    def died(self, name: str, why: str, restart_s: float) -> None:
        say("died", name, why, f"{restart_s:g}")

    def stopping(self, name: str) -> None:
        say("stopping", name)

    def stopped(self, name: str, *, by_itself: bool) -> None:
        say("stopped", name, str(by_itself))


def say(*words: str) -> None:
    sys.stdout.write("|".join(words) + "\n")
    sys.stdout.flush()


async def main(folder: Path, modes: Mapping[str, str]) -> int:
    async def on_ready(took_s: Mapping[str, float]) -> None:
        if asked := modes.get("asked"):
            first = (folder / f"{asked}.pid").read_text()
            say("asking", asked)
            from tests.support.answers import until

            await until(lambda: (folder / f"{asked}.pid").read_text() != first, "another")
        if idle := modes.get("idle"):
            for child in supervisor._children.values():
                child.spec = replace(child.spec, idle_s_max=float(idle))
        say("all-ready", *sorted(took_s))

    display: Display = LineDisplay()
    if modes.get("display") == "terminal":
        from kaiten.cli.display import TerminalDisplay

        display = TerminalDisplay()
    try:
        supervisor = Supervisor(toy_stack(folder, modes), display)
        supervisor.stop_by_signals()
        return await supervisor.run(on_ready)
    except StartError as error:
        say("error", error.cause.replace("\n", " "), error.fix.replace("\n", " "))
        return 1


if __name__ == "__main__":
    chosen = dict(argument.split("=", 1) for argument in sys.argv[2:])
    sys.exit(asyncio.run(main(Path(sys.argv[1]), chosen)))
