"""The `kaiten` command."""

import errno
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

INTERRUPTED: Final = 130
# As a shell tells of it.
TERMINATED: Final = 143
# Of `open`, for each of the three that a process begins with.
STREAMS: Final = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))
# What only writing to them can say here: there is no room, or no terminal any more.
UNWRITTEN: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Entry point of the console script; what it needs is imported when it runs."""
    to_its_end(_command)


def to_its_end(command: Callable[[], object]) -> NoReturn:
    """A program to its end, with streams that are whole. What cannot be written is told in a
    sentence, and an interruption is an exit code.
    """
    code: object = 0
    try:
        _make_whole()
        if os.getpid() == 1:
            _end_by_signal()
        command()
    except SystemExit as ended:
        # With 1 rich leaves a pipe that nobody reads: `kaiten --help | head`.
        code = 0 if isinstance(ended.__context__, BrokenPipeError) else ended.code
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as error:
        if error.errno not in UNWRITTEN or error.filename is not None:
            raise
        code = _unwritten(error)
    # Here it can be told; at the interpreter's end it is exit code 120 and a trace.
    try:
        sys.stdout.flush()
    except OSError as error:
        code = code or _unwritten(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)  # type: ignore[arg-type]


def _command() -> None:
    words = sys.argv[1:]
    if _is_healthy(words):
        return
    # Below errors gRPC has a line for each handshake that fails; who must know is told by us.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from kaiten.local import services
    from kaiten.start_error import StartError

    if words and words[0] in services.MODULES:
        # Of what is missing the command line tells, which a part itself does not import.
        with suppress(StartError):
            become(words[0], words[1:])
    from kaiten.cli import app

    app.main()


def become(role: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a part. Its parent sees one process, and signals reach it.

    StartError: what it needs is not installed.
    """
    from kaiten.cli import packages
    from kaiten.local import services

    packages.require({"archive": "scheduler", "profile": "worker"}.get(role, role))
    module = services.module(role, arguments)
    command = (*services.command("kaiten.part"), module, *arguments)
    os.execve(command[0], command, os.environ | services.environ())


def _end_by_signal() -> None:
    """Of what it has no handler for a container's first process hears nothing: told to end while it
    imports, it would go on until it is killed, and by then others have given it work."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED))


def _make_whole() -> None:
    """Streams that were closed are opened on nothing, before a connection takes their number; what
    a stream has no character for is replaced."""
    for name, mode in STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        stream = getattr(sys, name)
        # Whoever calls us as a function may have put another in its place.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _unwritten(error: OSError) -> int:
    """Say what became of the output; the exit code."""
    if isinstance(error, BrokenPipeError):
        # `kaiten ps | head`: nobody reads any more, and that is fine.
        return 0
    sys.stderr.write(f"the output cannot be written: {error.strerror}\n")
    return 1


def _is_healthy(words: list[str]) -> bool:
    """`kaiten healthcheck ADDRESS`, without TLS, of a part that serves: answered with no import of
    the command line's or gRPC's. For everything else False: the command itself says what is wrong.
    """
    if len(words) != 2 or words[0] != "healthcheck" or "://" in words[1]:
        return False
    if any(name.startswith("KAITEN_TLS") for name in os.environ):
        return False
    from kaiten.probe import says_serving

    if says_serving(words[1]):
        print(f"{words[1]} serving")
        return True
    return False
