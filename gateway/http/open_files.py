"""Files of the process: every connection takes one, and there are only so many."""

import asyncio
import math
import resource
from contextlib import suppress
from typing import Any, Final

import structlog

log = structlog.get_logger()

# The store's connections, the pages of a model, pipes of children, whatever a library opens.
FILES_BESIDE: Final = 512
# asyncio's own words.
NONE_LEFT: Final = "socket.accept() out of system resource"
TOLD_EVERY_S: Final = 10.0


def make_room(connections: int) -> None:
    """Take as many files as so many connections need, of those that this process may have. A shell
    and systemd begin a process with 1024, and let it take hundreds of thousands.
    """
    wanted = connections + FILES_BESIDE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < possible:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (possible, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        log.warning("files.few", open_files=soft, needed=wanted, fix="ulimit -Hn, LimitNOFILE=")


class NotTaken:
    """An event loop's handler of exceptions. Without a file for a connection asyncio tries as often
    as the queue is long, tells of each try with a trace, and does the same a second later: that is
    megabytes of log a second. This tells of one now and then.
    """

    def __init__(self) -> None:
        self._told_s = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if context["message"] != NONE_LEFT:
            loop.default_exception_handler(context)
        elif loop.time() - self._told_s >= TOLD_EVERY_S:
            self._told_s = loop.time()
            log.error("connections.not_taken", reason=str(context["exception"]))
