"""Where readers of an archive may begin: a leader says so once in a while, between two records.

It copies what is small of what its timelines know; what that is in bytes, the archive's own thread
finds out.
"""

from functools import partial

from ledger import Commit
from scheduler_svc.archiving import Archive
from scheduler_svc.core.commands import Configured
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.journal import Journal
from scheduler_svc.snapshot_wire import snapshot_to_proto
from scheduler_svc.timeline import Timelines


class Snapshots:
    """Of one leadership; None: it keeps no archive."""

    def __init__(self, archive: Archive | None, timelines: Timelines, core: Scheduler) -> None:
        self._archive, self._timelines, self._core = archive, timelines, core

    def due(self, journal: Journal, configured: Configured, now_ns: int) -> Commit | None:
        """A record of all that was told until now, behind which a snapshot will stand; None:
        the archive wants none yet.
        """
        if self._archive is None or not self._archive.wants_snapshot:
            return None
        commit = journal.opened(now_ns)
        specs = {id: worker.spec for id, worker in self._core.workers.items()}
        seq, snapshot = commit.record.seq, self._timelines.snapshot_all()
        self._archive.snapshot(seq, partial(snapshot_to_proto, seq, snapshot, configured, specs))
        return commit
