"""The live core as a value: who runs where with which blocks, who waits and why. Pure.

A view is of one moment, between two commands, and shares nothing that changes: whoever has it may
take as long as they like. It is looked at on the event loop, so it is made of tuples, which cost a
third of what frozen dataclasses do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from scheduler_svc.core.commands import Configured
from scheduler_svc.core.outcome import PassedOver, Why
from scheduler_svc.core.requests import Sequence, State
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import BlockId, Request, SequenceId, SlotIndex, WorkerSpec
from scheduler_svc.core.workers import Worker
from scheduler_svc.timeline import BEHIND, QUEUE_STAGES

# Of the queue; all that stand behind are only counted.
WAITING_SHOWN_MAX: Final = 1024


class SeenState(Enum):
    """Where in its life a sequence is seen."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    # Its last token is certain to come, and its slot is free already.
    RETIRING = "retiring"
    # It forks from its request's first choice, once that has computed the prompt.
    FORKING = "forking"


class Place(NamedTuple):
    """Where it is. `slot` counts while it runs."""

    state: SeenState
    worker_id: str
    slot: SlotIndex
    num_preemptions: int


# `num_tokens`, `num_scheduled_tokens`, `num_computed_tokens` (docs/core.md); of a sequence that is
# nowhere, all tokens known and no KV.
Counts = tuple[int, int, int]


# Of one layer group: all blocks from the front, and how many of those were given back.
Table = tuple[int, tuple[BlockId, ...]]


class Passed(NamedTuple):
    """A stage of the planner passed somebody over. `worker_id` empty: whichever worker it was."""

    worker_id: str
    stage: str
    why: Why


class SequenceView(NamedTuple):
    """A sequence that runs, or is among the first that wait."""

    request: Request
    choice: int
    place: Place
    counts: Counts
    tables: tuple[Table, ...]
    passed_over: tuple[Passed, ...]


# Fields in order, and nothing of what a call by name costs: there are hundreds in a look.
_placed: Final[Callable[[tuple[object, ...]], Place]] = partial(tuple.__new__, Place)
_viewed: Final[Callable[[tuple[object, ...]], SequenceView]] = partial(tuple.__new__, SequenceView)


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


class Moment(NamedTuple):
    """When: behind this record of this leadership, on the ledger's clock."""

    epoch: int
    seq: int
    committed_seq: int
    unix_ns: int


@dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class View:
    """All of it."""

    moment: Moment
    configured: Configured
    workers: Mapping[str, WorkerView]
    sequences: Mapping[SequenceId, SequenceView]
    # In order, as many as are shown, and the length of the whole queue.
    queue: tuple[SequenceId, ...]
    waiting: int


# By worker: whom its newest look at the queue passed over. A worker that has none was never asked.
Looks = Mapping[Worker, tuple[PassedOver, ...]]


def look(
    core: Scheduler,
    moment: Moment,
    configured: Configured,
    looks: Looks,
    addresses: Mapping[str, str],
) -> View:
    """The core as it is. `addresses`: of the workers, by their ids."""
    why = _reasons(core.workers.values(), looks)
    for worker in core.workers.values():
        if (closed := _why_no_plan(core, worker)) is not None:
            why[None, worker.id] = [Passed(worker.id, "plan", closed)]
    queue = list(islice(core.waiting, WAITING_SHOWN_MAX))
    return View(
        moment=moment,
        configured=configured,
        workers={
            worker_id: _worker(worker, addresses.get(worker_id, ""), tuple(why[None, worker_id]))
            for worker_id, worker in core.workers.items()
        },
        sequences=dict(_sequences(core, queue, why)),
        queue=tuple([sequence.sequence_id for sequence in queue]),
        waiting=len(core.waiting),
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
    )


def _sequences(
    core: Scheduler, queue: list[Sequence], why: _Reasons
) -> Iterator[tuple[SequenceId, SequenceView]]:
    for worker in core.workers.values():
        for sequence in worker.running.values():
            yield sequence.sequence_id, _running(sequence, SeenState.RUNNING)
            if sequence.live.siblings:
                yield from _forking(sequence)
        for sequence in worker.retiring.values():
            yield sequence.sequence_id, _running(sequence, SeenState.RETIRING)
            if sequence.live.siblings:
                yield from _forking(sequence)
    for sequence in queue:
        state = SeenState.WAITING if sequence.state is State.WAITING else SeenState.PREEMPTED
        passed_over = tuple(why.get((sequence.sequence_id, ""), ()))
        if sequence.live.tenant.is_throttled:
            passed_over = (Passed("", "queue", Why.TENANT),)
        yield sequence.sequence_id, _waiting(sequence, state, passed_over)
        yield from _forking(sequence)


def _forking(first: Sequence) -> Iterator[tuple[SequenceId, SequenceView]]:
    """Further choices that stand in no queue yet."""
    for sibling in first.live.siblings if first.choice == 0 else ():
        yield sibling.sequence_id, _waiting(sibling, SeenState.FORKING, ())


def _running(sequence: Sequence, state: SeenState) -> SequenceView:
    residency, table = sequence.residency, sequence.kv
    assert residency is not None
    slot = residency.slot if state is SeenState.RUNNING else 0
    return _viewed(
        (
            sequence.live.request,
            sequence.choice,
            _placed((state, residency.worker_id, slot, sequence.num_preemptions)),
            _counts(sequence),
            tuple(zip(table.num_skipped_blocks, map(tuple, table.blocks), strict=True)),
            (),
        )
    )


def _counts(sequence: Sequence) -> Counts:
    """What `Sequence` says of each, at once: five calls less for each of hundreds."""
    num_known = len(sequence.tokens)
    num_tokens = num_known + sequence.num_tokens_ahead
    return num_tokens, num_tokens - sequence.gap, num_known - sequence.num_uncomputed_tokens


def _waiting(sequence: Sequence, state: SeenState, passed_over: tuple[Passed, ...]) -> SequenceView:
    return SequenceView(
        sequence.live.request,
        sequence.choice,
        Place(state, "", 0, sequence.num_preemptions),
        (len(sequence.tokens), 0, 0),
        (),
        passed_over,
    )
