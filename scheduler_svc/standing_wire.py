"""What timelines know at one moment, as an archive's starting point has it, and back."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

from kaiten.v1.archive_pb2 import StandingChoice as ChoiceMessage
from kaiten.v1.archive_pb2 import StandingLook, StandingRequest, StartingPoint
from kaiten.v1.archive_pb2 import StandingWorker as WorkerMessage
from scheduler_svc.command_wire import configured_to_proto, described
from scheduler_svc.core.commands import Configured
from scheduler_svc.core.types import SequenceId, WorkerSpec
from scheduler_svc.timeline_standing import Standing, StandingChoice, StandingWorker
from scheduler_svc.timeline_track import NOT_ARCHIVED, Look, Phase, Step, Track, Transition
from scheduler_svc.timeline_wire import PHASE_FROM_PROTO, PHASE_TO_PROTO

# Of what is written here. A reader passes over what it does not know.
VERSION: Final = 1


def start_to_proto(
    seq: int, standing: Standing, configured: Configured, specs: Mapping[str, WorkerSpec]
) -> StartingPoint:
    """`specs`: of the workers that are here."""
    return StartingPoint(
        version=VERSION,
        seq=seq,
        now_ns=standing.now_ns,
        since_ns=standing.since_ns,
        lost_ns=standing.lost_ns,
        configured=configured_to_proto(configured),
        workers=[_worker(id, one, specs.get(id)) for id, one in standing.workers.items()],
        requests=_requests(standing),
        is_cut=standing.is_cut,
        look=_look(standing.look) if standing.look is not None else None,
        store_behind_ns=standing.store_behind_ns,
        closed_ns=standing.closed_ns,
        closed_why=standing.closed_why,
        throttled_ns=standing.throttled_ns,
    )


def _look(look: Look) -> StandingLook:
    return StandingLook(at_ns=look.at_ns, why=look.why, head=look.head)


def _worker(id: str, worker: StandingWorker, spec: WorkerSpec | None) -> WorkerMessage:
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


def _requests(standing: Standing) -> Iterator[StandingRequest]:
    """Choices of one follow each other, but for those that are told of for their slot."""
    number = {id: index for index, id in enumerate(standing.workers, 1)}
    slots = {
        (id, sequence_id): slot
        for id, worker in standing.workers.items()
        for slot, sequence_id in worker.slots.items()
    }
    for _, some in groupby(standing.live, key=lambda one: one[0].id):
        choices = [*some]
        first = choices[0][0]
        yield StandingRequest(
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


def standing_from_proto(message: StartingPoint) -> Standing:
    """What timelines go on from."""
    names = ["", *(worker.worker_id for worker in message.workers)]
    live = tuple(_live(message, names))
    slots: dict[str, dict[int, SequenceId]] = {name: {} for name in names}
    for request in message.requests:
        for choice in request.choices:
            if choice.HasField("slot"):
                slots[names[choice.worker]][choice.slot] = request.sequence_id + choice.choice
    return Standing(
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


def _live(message: StartingPoint, names: Sequence[str]) -> Iterator[StandingChoice]:
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


def _worker_from(worker: WorkerMessage, slots: Mapping[int, SequenceId]) -> StandingWorker:
    plans = zip(worker.plan_ids, worker.plan_prompt_tokens, worker.plan_largest, strict=True)
    return StandingWorker(
        block_size=worker.worker.block_size,
        closed_why=worker.closed_why,
        late_ns=worker.late_ns,
        look=_look_from(worker.look) if worker.HasField("look") else None,
        steps=tuple(_steps_from(worker)),
        slots=slots,
        prompt_tokens={id: (count, largest or None) for id, count, largest in plans},
    )


def _look_from(look: StandingLook) -> tuple[str, SequenceId | None]:
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
