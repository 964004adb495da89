"""A child of `replaying`: one question as JSON on stdin, one ReplayTimelineResponse on stdout."""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from kaiten.v1.archive_pb2 import ArchiveEntry
from kaiten.v1.scheduler_service_pb2 import ReplayTimelineResponse
from ledger.archive.reader import Wanted, chunks
from ledger.archive.remote import remote_entries
from scheduler_svc.archived_timeline import archived_timeline
from service_kit import logs
from service_kit.peers import Peers, PeerSettings

# A core whose machine is busy throughout still gets a quarter of a processor.
NICE: Final = 5
MEMORY_BYTES_MAX: Final = 2 << 30
# Clients take twice that.
ANSWER_BYTES_MAX: Final = 8 << 20


def main() -> int:
    logs.configure("scheduler", "warning")
    question = json.load(sys.stdin)
    give_way(question["cpu_s_max"], question["wall_s_max"])
    peers = Peers.of(PeerSettings(**question["peer"]))
    # The same sentence once, though archives are read twice.
    missed: dict[str, None] = {}

    def read(wanted: Wanted) -> Iterator[ArchiveEntry]:
        return remote_entries(
            question["addresses"],
            wanted,
            peers=peers,
            own=chunks([Path(folder) for folder in question["folders"]], wanted),
            missed=lambda why: missed.setdefault(f"another scheduler's archive: {why}"),
        )

    told = ReplayTimelineResponse()
    try:
        for id in question["ids"]:
            told = archived_timeline(read, id, question["since_ns"])
            if told.choices:
                break
    except ValueError as error:
        # Of a later version, or not what a writer writes.
        told = ReplayTimelineResponse(skipped=[str(error)])
    told.skipped.extend(missed)
    if told.ByteSize() > ANSWER_BYTES_MAX:
        told = ReplayTimelineResponse(skipped=["it is too much to be told"])
    sys.stdout.buffer.write(told.SerializeToString())
    return 0


def give_way(cpu_s_max: int, wall_s_max: int) -> None:
    """To everybody, and end by itself, though nobody kills it any more: what it reads may never end
    either, as where another scheduler is stopped.
    """
    os.nice(NICE)
    signal.alarm(wall_s_max)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s_max, cpu_s_max))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


if __name__ == "__main__":
    sys.exit(main())
