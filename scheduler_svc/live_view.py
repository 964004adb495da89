"""The live core as a value: who runs where with which blocks, who waits and why. Pure.

A view is of one moment, between two commands, and shares nothing that changes: whoever has it may
take as long as they like. It is looked at on the event loop, so those on a worker are columns, of
each row is read what may have changed only, and what has not is the view's before.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from itertools import compress, islice
from operator import ne
from typing import Final, NamedTuple

from scheduler_svc.core.commands import Configured
from scheduler_svc.core.outcome import PassedOver, Why
from scheduler_svc.core.requests import Residency, Sequence, State
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BlockId, Config, Request, SequenceId, WorkerSpec
from scheduler_svc.core.workers import Worker
from scheduler_svc.timeline_track import BEHIND, QUEUE_STAGES

# Of the queue; all that stand behind are only counted.
WAITING_SHOWN_MAX: Final = 1024


class SeenState(Enum):
    """Of a sequence on no worker."""

    WAITING = "waiting"
    PREEMPTED = "preempted"
    # It forks from its request's first choice, once that has computed the prompt.
    FORKING = "forking"


# `num_tokens`, `num_scheduled_tokens`, `num_computed_tokens` (docs/core.md); of a sequence that is
# nowhere, all tokens known and no KV.
Counts = tuple[int, int, int]


class Seen(NamedTuple):
    """A block table, as of a version. By layer group: all blocks from the front, and how many of
    those were given back; and how often its sequence was preempted before.
    """

    version: int
    num_skipped_blocks: tuple[int, ...]
    blocks: tuple[tuple[BlockId, ...], ...]
    num_preemptions: int


class Passed(NamedTuple):
    """A stage of the planner passed somebody over. `worker_id` empty: whichever worker it was."""

    worker_id: str
    stage: str
    why: Why


THROTTLED: Final = (Passed("", "queue", Why.TENANT),)


class Rows(NamedTuple):
    """Who is on a worker, a row each: those that retire, and behind them those that run. Of who is
    in the view before, and has the same tables, it is the very same that was seen. The members
    themselves change: they, and the versions of their tables, are only compared by the next look.
    """

    members: list[Sequence]
    versions: list[int]
    seen: Mapping[Residency, Seen]
    num_retiring: int
    counts: list[Counts]


NO_ROWS: Final = Rows([], [], {}, 0, [])


class WaitingView(NamedTuple):
    """A sequence on no worker that is shown: it is among the first that wait, or forks later."""

    request: Request
    choice: int
    state: SeenState
    num_preemptions: int
    num_tokens: int
    passed_over: tuple[Passed, ...]


# Fields in order, and nothing of what a call by name costs: there may be a thousand in a look.
_seen: Final[Callable[[tuple[object, ...]], Seen]] = partial(tuple.__new__, Seen)
_viewed: Final[Callable[[tuple[object, ...]], WaitingView]] = partial(tuple.__new__, WaitingView)


class PlanView(NamedTuple):
    """A plan in flight."""

    plan_id: int
    lease_steps: int
    steps_answered: int


class WorkerView(NamedTuple):
    """A worker, but for its sequences. `passed_over`: whoever it might have been."""

    address: str
    spec: WorkerSpec
    blocks_free: int
    is_draining: bool
    is_late: bool
    plans: tuple[PlanView, ...]
    passed_over: tuple[Passed, ...]
    # A byte per block.
    cached: bytes
    # Blocks of the host's memory that hold something.
    host_used: int


class Moment(NamedTuple):
    """When: behind this record of this leadership, on the ledger's clock."""

    epoch: int
    seq: int
    committed_seq: int
    unix_ns: int


@dataclass(frozen=True, kw_only=True)
class View:
    """All of it."""

    moment: Moment
    configured: Configured
    workers: Mapping[str, WorkerView]
    rows: Mapping[str, Rows]
    waiting: Mapping[SequenceId, WaitingView]
    # In order, as many as are shown, and the length of the whole queue.
    queue: tuple[SequenceId, ...]
    queue_length: int

    @cached_property
    def resident_ids(self) -> Mapping[str, list[SequenceId]]:
        """Of the rows, by worker. For who tells of it, not for the event loop."""
        return {
            worker_id: [one.sequence.sequence_id for one in rows.seen]
            for worker_id, rows in self.rows.items()
        }

    @cached_property
    def sequence_ids(self) -> set[SequenceId]:
        """Of all who are seen."""
        return set(self.waiting).union(*self.resident_ids.values())


# What who begins to watch knows.
NOTHING: Final = View(
    moment=Moment(0, 0, 0, 0),
    configured=Configured(config=Config(), policy=""),
    workers={},
    rows={},
    waiting={},
    queue=(),
    queue_length=0,
)

# By worker: whom its newest look at the queue passed over. A worker that has none was never asked.
Looks = Mapping[Worker, tuple[PassedOver, ...]]


def look(
    core: Scheduler,
    moment: Moment,
    configured: Configured,
    looks: Looks,
    addresses: Mapping[str, str],
    before: View | None = None,
) -> View:
    """The core as it is. `addresses`: of the workers, by their ids. `before`: of an earlier look at
    the same core, if there is one.
    """
    why = _reasons(core.workers.values(), looks)
    for worker in core.workers.values():
        if (closed := _why_no_plan(core, worker)) is not None:
            why[None, worker.id] = [Passed(worker.id, "plan", closed)]
    queue = list(islice(core.waiting, WAITING_SHOWN_MAX))
    rows = {} if before is None else before.rows
    return View(
        moment=moment,
        configured=configured,
        workers={
            worker_id: _worker(worker, addresses.get(worker_id, ""), tuple(why[None, worker_id]))
            for worker_id, worker in core.workers.items()
        },
        rows={
            worker_id: _rows(worker, rows.get(worker_id, NO_ROWS))
            for worker_id, worker in core.workers.items()
        },
        waiting=dict(_waiting(core, queue, why, {} if before is None else before.waiting)),
        queue=tuple([sequence.sequence_id for sequence in queue]),
        queue_length=len(core.waiting),
    )


# By sequence, or by worker for those that name none.
_Reasons = defaultdict[tuple[SequenceId | None, str], list[Passed]]


def why_it_waits(
    passed_over: Iterable[PassedOver],
) -> Callable[[Sequence], tuple[str, SequenceId | None]]:
    """Of any sequence in the queue: why it was not scheduled by a plan that passed these over, and
    who stands before it that could not start.
    """
    looks = [over for over in passed_over if over.stage in QUEUE_STAGES]
    named = {over.sequence_id: over.why.value for over in looks}
    last = looks[-1] if looks else None

    def why(sequence: Sequence) -> tuple[str, SequenceId | None]:
        if sequence.live.tenant.is_throttled:
            return Why.TENANT.value, None
        if sequence.sequence_id in named:
            return named[sequence.sequence_id], None
        return (BEHIND, None) if last is None else (last.why.value, last.sequence_id)

    return why


def _reasons(workers: Iterable[Worker], looks: Looks) -> _Reasons:
    why: _Reasons = defaultdict(list)
    for worker in workers:
        for over in looks.get(worker, ()):
            key = (None, worker.id) if over.sequence_id is None else (over.sequence_id, "")
            why[key].append(Passed(worker.id, over.stage, over.why))
    return why


def _why_no_plan(core: Scheduler, worker: Worker) -> Why | None:
    """Whatever its newest look at the queue found."""
    if core.is_store_behind:
        return Why.STORE_BEHIND
    return Why.LATE if worker.is_late else None


def _worker(worker: Worker, address: str, passed_over: tuple[Passed, ...]) -> WorkerView:
    return WorkerView(
        address=address,
        spec=worker.spec,
        blocks_free=worker.kv.free_count,
        is_draining=worker.is_draining,
        is_late=worker.is_late,
        plans=tuple([PlanView(f.plan_id, f.lease_steps, f.answered) for f in worker.flights]),
        passed_over=passed_over,
        cached=worker.kv.cached,
        host_used=worker.kv.host_used,
    )


def _rows(worker: Worker, before: Rows) -> Rows:
    members = worker.members
    versions = [one.kv.version for one in members]
    if members != before.members:
        seen = _seen_of(members, before.seen)
    elif versions == before.versions:
        seen = before.seen
    else:
        changed = map(ne, versions, before.versions)
        seen = {**before.seen, **_seen_of(compress(members, changed), {})}
        # Whoever left and came back is another resident.
        if len(seen) != len(members):
            seen = _seen_of(members, before.seen)
    counts = [
        (
            (num_tokens := (num_known := len(one.tokens)) + one.num_tokens_ahead),
            num_tokens - one.gap,
            num_known - one.num_uncomputed_tokens,
        )
        for one in members
    ]
    return Rows(members, versions, seen, len(worker.retiring), counts)


def _seen_of(
    members: Iterable[Sequence], before: Mapping[Residency, Seen]
) -> Mapping[Residency, Seen]:
    seen: dict[Residency, Seen] = {}
    for sequence in members:
        residency, table = sequence.residency, sequence.kv
        assert residency is not None
        kept = before.get(residency)
        if kept is None or kept[0] != table.version:
            skipped, blocks = tuple(table.num_skipped_blocks), tuple(map(tuple, table.blocks))
            kept = _seen((table.version, skipped, blocks, sequence.num_preemptions))
        seen[residency] = kept
    return seen


def _waiting(
    core: Scheduler,
    queue: Iterable[Sequence],
    why: _Reasons,
    before: Mapping[SequenceId, WaitingView],
) -> Iterator[tuple[SequenceId, WaitingView]]:
    """Who waits, and further choices that stand in no queue yet."""
    for sequence in queue:
        sequence_id, live = sequence.sequence_id, sequence.live
        state = SeenState.WAITING if sequence.state is State.WAITING else SeenState.PREEMPTED
        passed_over = tuple(why.get((sequence_id, ""), ()))
        if live.tenant.is_throttled:
            passed_over = THROTTLED
        yield sequence_id, _of(sequence, state, passed_over, before)
        if live.siblings:
            yield from _forking(sequence, before)
    for worker in core.workers.values():
        for sequence in worker.members:
            if sequence.live.siblings:
                yield from _forking(sequence, before)


def _forking(
    first: Sequence, before: Mapping[SequenceId, WaitingView]
) -> Iterator[tuple[SequenceId, WaitingView]]:
    for sibling in first.live.siblings if first.choice == 0 else ():
        yield sibling.sequence_id, _of(sibling, SeenState.FORKING, (), before)


def _of(
    sequence: Sequence,
    state: SeenState,
    passed_over: tuple[Passed, ...],
    before: Mapping[SequenceId, WaitingView],
) -> WaitingView:
    """Those before, as long as they are right: who tells of it need not compare them."""
    kept = before.get(sequence.sequence_id)
    changing = state, sequence.num_preemptions, len(sequence.tokens), passed_over
    if kept is not None and kept[2:] == changing:
        return kept
    return _viewed((sequence.live.request, sequence.choice, *changing))
