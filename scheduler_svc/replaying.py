"""A leader's side of ReplayTimeline: the archives are read by a process of its own.

That takes up to a minute of a processor, which the leader has none of. So a child does it
(`replay_child`), which gives way to everybody and is bounded in time and memory; it is killed with
whoever asked.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from kaiten.v1.scheduler_service_pb2 import ReplayTimelineRequest, ReplayTimelineResponse
from scheduler_svc.archiving import folder_of
from scheduler_svc.settings import SchedulerSettings
from service_kit.errors import NotFound
from service_kit.peers import PeerSettings

log = structlog.get_logger()

PACKAGES: Final = Path(__file__).parents[1]
CHILD: Final = "scheduler_svc.replay_child"
# We kill it before.
LATER_S: Final = 10


async def replayed(
    settings: SchedulerSettings, request: ReplayTimelineRequest, addresses: Sequence[str]
) -> ReplayTimelineResponse:
    """As this scheduler's archive and those of the schedulers there tell it. NotFound: none of them
    is kept, or they are not to be replayed.
    """
    folder, most_s = folder_of(settings), settings.replay_s
    if not most_s or (folder is None and not addresses):
        raise NotFound("an archive of this cell's schedulers (--archive-dir, --replay-s)")
    has_folder = folder is not None and folder.is_dir()
    peer = {name: getattr(settings, name) for name in PeerSettings.model_fields}
    question = {
        "ids": list(request.ids),
        "since_ns": request.since_unix_ns,
        "folders": [str(folder)] if has_folder else [],
        "addresses": list(addresses),
        "peer": {name: str(value) for name, value in peer.items() if value is not None},
        "cpu_s_max": most_s,
        "wall_s_max": most_s + LATER_S,
    }
    try:
        async with asyncio.timeout(most_s):
            code, told = await _child(json.dumps(question).encode())
    except TimeoutError:
        return _nothing(f"it takes longer than {most_s} s (--replay-s of the scheduler)")
    except OSError as error:
        log.error("replay.failed", reason=error.strerror)
        return _nothing("no process could be started for it")
    if code:
        log.error("replay.failed", exit_code=code)
        return _nothing("the process that replays them failed")
    return ReplayTimelineResponse.FromString(told)


def _nothing(why: str) -> ReplayTimelineResponse:
    return ReplayTimelineResponse(skipped=[why])


async def _child(question: bytes) -> tuple[int, bytes]:
    """How it ended, and what it said."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", CHILD),
        # The first place on its path, wherever this process has its own from.
        cwd=PACKAGES,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        told, _ = await process.communicate(question)
        return process.returncode or 0, told
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
