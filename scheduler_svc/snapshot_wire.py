"""What timelines know at one moment, as an archive's snapshot has it, and back."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

from kaiten.v1.archive_pb2 import ChoiceSnapshot as ChoiceMessage
from kaiten.v1.archive_pb2 import LookSnapshot, RequestSnapshot, Snapshot
from kaiten.v1.archive_pb2 import WorkerSnapshot as WorkerMessage
from scheduler_svc.command_wire import configured_to_proto, described
from scheduler_svc.core.commands import Configured
from scheduler_svc.core.types import SequenceId, WorkerSpec
from scheduler_svc.timeline_snapshot import ChoiceSnapshot, TimelineSnapshot, WorkerSnapshot
from scheduler_svc.timeline_track import NOT_ARCHIVED, Look, Phase, Step, Track, Transition
from scheduler_svc.timeline_wire import PHASE_FROM_PROTO, PHASE_TO_PROTO

# Of what is written here. A reader passes over what it does not know.
VERSION: Final = 1


def snapshot_to_proto(
    seq: int, snapshot: TimelineSnapshot, configured: Configured, specs: Mapping[str, WorkerSpec]
) -> Snapshot:
    """`specs`: of the workers that are here."""
    return Snapshot(
        version=VERSION,
        seq=seq,
        now_ns=snapshot.now_ns,
        since_ns=snapshot.since_ns,
        lost_ns=snapshot.lost_ns,
        configured=configured_to_proto(configured),
        workers=[_worker(id, one, specs.get(id)) for id, one in snapshot.workers.items()],
        requests=_requests(snapshot),
        is_cut=snapshot.is_cut,
        look=_look(snapshot.look) if snapshot.look is not None else None,
        store_behind_ns=snapshot.store_behind_ns,
        closed_ns=snapshot.closed_ns,
        closed_why=snapshot.closed_why,
        throttled_ns=snapshot.throttled_ns,
    )


def _look(look: Look) -> LookSnapshot:
    return LookSnapshot(at_ns=look.at_ns, why=look.why, head=look.head)


def _worker(id: str, worker: WorkerSnapshot, spec: WorkerSpec | None) -> WorkerMessage:
    steps = worker.steps
    first = Step(0, 0, 0)
    return WorkerMessage(
        worker_id=id,
        worker=described(spec) if spec is not None else None,
        closed_why=worker.closed_why,
        late_ns=worker.late_ns,
        look=_look(Look(0, *worker.look)) if worker.look is not None else None,
        step_after_ns=[b.answered_ns - a.answered_ns for a, b in pairwise((first, *steps))],
        step_plan_id=[b.plan_id - a.plan_id for a, b in pairwise((first, *steps))],
        step_rows=[step.rows for step in steps],
        step_prompt_tokens=[step.prompt_tokens for step in steps],
        step_largest=[step.largest or 0 for step in steps],
        step_us=[step.step_us for step in steps],
        plan_ids=worker.prompt_tokens,
        plan_prompt_tokens=[count for count, _ in worker.prompt_tokens.values()],
        plan_largest=[largest or 0 for _, largest in worker.prompt_tokens.values()],
    )


def _requests(snapshot: TimelineSnapshot) -> Iterator[RequestSnapshot]:
    """Choices of one follow each other, but for those that are told of for their slot."""
    number = {id: index for index, id in enumerate(snapshot.workers, 1)}
    slots = {
        (id, sequence_id): slot
        for id, worker in snapshot.workers.items()
        for slot, sequence_id in worker.slots.items()
    }
    for _, some in groupby(snapshot.live, key=lambda one: one[0].id):
        choices = [*some]
        first = choices[0][0]
        yield RequestSnapshot(
            id=first.id,
            tenant=first.tenant,
            sequence_id=first.sequence_id - first.choice,
            arrived_ns=first.transitions[0].at_ns,
            choices=[
                ChoiceMessage(
                    choice=track.choice,
                    phase=PHASE_TO_PROTO[newest.phase],
                    why=newest.why,
                    worker=number.get(newest.worker_id, 0),
                    slot=slots.get((newest.worker_id, track.sequence_id)),
                    num_preemptions=num_preemptions,
                )
                for track, newest, num_preemptions in choices
            ],
        )


def snapshot_from_proto(message: Snapshot) -> TimelineSnapshot:
    """What timelines go on from."""
    names = ["", *(worker.worker_id for worker in message.workers)]
    live = tuple(_live(message, names))
    slots: dict[str, dict[int, SequenceId]] = {name: {} for name in names}
    for request in message.requests:
        for choice in request.choices:
            if choice.HasField("slot"):
                slots[names[choice.worker]][choice.slot] = request.sequence_id + choice.choice
    return TimelineSnapshot(
        now_ns=message.now_ns,
        since_ns=message.since_ns,
        lost_ns=message.lost_ns,
        live=live,
        is_cut=message.is_cut,
        workers={
            worker.worker_id: _worker_from(worker, slots[worker.worker_id])
            for worker in message.workers
        },
        look=Look(message.look.at_ns, *_look_from(message.look))
        if message.HasField("look")
        else None,
        store_behind_ns=message.store_behind_ns,
        closed_ns=message.closed_ns,
        closed_why=message.closed_why,
        throttled_ns=dict(sorted(message.throttled_ns.items())),
    )


def _live(message: Snapshot, names: Sequence[str]) -> Iterator[ChoiceSnapshot]:
    for request in message.requests:
        for choice in request.choices:
            track = Track(
                request.id,
                request.tenant,
                request.sequence_id + choice.choice,
                choice.choice,
                [Transition(request.arrived_ns, Phase.UNKNOWN, NOT_ARCHIVED)],
            )
            phase = PHASE_FROM_PROTO.get(choice.phase, Phase.UNKNOWN)
            newest = Transition(message.now_ns, phase, choice.why, names[choice.worker])
            yield track, newest, choice.num_preemptions


def _worker_from(worker: WorkerMessage, slots: Mapping[int, SequenceId]) -> WorkerSnapshot:
    plans = zip(worker.plan_ids, worker.plan_prompt_tokens, worker.plan_largest, strict=True)
    return WorkerSnapshot(
        block_size=worker.worker.block_size,
        closed_why=worker.closed_why,
        late_ns=worker.late_ns,
        look=_look_from(worker.look) if worker.HasField("look") else None,
        steps=tuple(_steps_from(worker)),
        slots=slots,
        prompt_tokens={id: (count, largest or None) for id, count, largest in plans},
    )


def _look_from(look: LookSnapshot) -> tuple[str, SequenceId | None]:
    return look.why, look.head if look.HasField("head") else None


def _steps_from(worker: WorkerMessage) -> Iterator[Step]:
    at_ns = plan_id = 0
    for after_ns, plans, rows, prompt_tokens, largest, step_us in zip(
        worker.step_after_ns,
        worker.step_plan_id,
        worker.step_rows,
        worker.step_prompt_tokens,
        worker.step_largest,
        worker.step_us,
        strict=True,
    ):
        at_ns, plan_id = at_ns + after_ns, plan_id + plans
        yield Step(at_ns, plan_id, rows, prompt_tokens, largest or None, step_us)
