"""Replay a journal through a fresh core: the same inputs must bring the same decisions.

A record holds what the core was told since the record before it, and what came of it. Given the
bodies of the requests (the journal names them by serial only), a replay makes every plan and every
ending again, and says of each what was recorded and what it got. A new epoch is a new core, which
resumes from what the records before had committed. Pure: records in, comparisons out.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

from ledger import InboxEntry
from protos.kaiten.v1.common_pb2 import Leader
from protos.kaiten.v1.ledger_pb2 import CoreInput, JournalRecord, SequenceFinished, SubmitRecord
from protos.kaiten.v1.worker_service_pb2 import RowSampling
from scheduler_svc import wire
from scheduler_svc.core.policies import Policy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Committed, Config, Event, Finished, Plan, Serial
from scheduler_svc.journal import plan_digest

Token = tuple[Serial, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One decision, as the journal has it and as the replay made it."""

    seq: int
    what: str
    recorded: object
    replayed: object

    @property
    def is_equal(self) -> bool:
        return self.recorded == self.replayed


@dataclass(slots=True)
class _Outputs:
    """What the records so far have committed."""

    tokens: dict[Serial, list[int]] = field(default_factory=dict)
    ended: set[Serial] = field(default_factory=set)

    def take(self, record: JournalRecord) -> None:
        for serial, token in zip(record.serials, record.token_ids, strict=True):
            self.tokens.setdefault(serial, []).append(token)
        self.ended.update(ending.serial for ending in record.finished)

    def of(self, serial: Serial) -> tuple[int, ...] | None:
        return None if serial in self.ended else tuple(self.tokens.get(serial, ()))


class Replay:
    """Replays the records it is fed, in order from the first of the journal."""

    def __init__(self, config: Config, policy: Policy, entries: Iterable[InboxEntry]) -> None:
        self._config = config
        self._policy = policy
        self._bodies: dict[Serial, tuple[InboxEntry, SubmitRecord]] = {
            entry.serial: (entry, entry.record)
            for entry in entries
            if isinstance(entry.record, SubmitRecord)
        }
        self._samplings = dict(_samplings(self._bodies))
        self._outputs = _Outputs()
        self._core = Scheduler(config, policy)
        self._epoch = 0

    def feed(self, record: JournalRecord) -> Iterator[Compared]:
        """Every plan of the record, then its tokens, then its endings."""
        if record.epoch != self._epoch:
            self._epoch = record.epoch
            self._core = Scheduler(self._config, self._policy)
        events: list[Event] = []
        tokens: list[Token] = []
        for item in record.inputs:
            if item.WhichOneof("input") == "plan":
                yield self._compare_plan(record.seq, item)
            elif item.WhichOneof("input") == "result":
                committed = self._commit(item)
                events += committed.events
                tokens += _tokens(committed)
            else:
                events += self._tell(item)
        recorded = list(zip(record.serials, record.positions, record.token_ids, strict=True))
        yield Compared(seq=record.seq, what="tokens", recorded=recorded, replayed=tokens)
        yield _compare_endings(record, events)
        self._outputs.take(record)

    def _compare_plan(self, seq: int, item: CoreInput) -> Compared:
        recorded = item.plan
        plan = self._core.plan(recorded.worker_id, now_ns=item.now_ns)
        return Compared(
            seq=seq,
            what=f"plan {recorded.plan_id} of {recorded.worker_id}",
            recorded=recorded.digest,
            replayed=None if plan is None else self._digest(plan),
        )

    def _digest(self, plan: Plan) -> int:
        samplings = [self._samplings[join.serial] for join in plan.joins]
        return plan_digest(wire.plan_to_proto(plan, Leader(), samplings))

    def _commit(self, item: CoreInput) -> Committed:
        step = wire.step_from_proto(item.result.worker_id, item.result.step)
        return self._core.commit(step, now_ns=item.now_ns)

    def _tell(self, item: CoreInput) -> list[Event]:
        core, now_ns = self._core, item.now_ns
        match item.WhichOneof("input"):
            case "submit":
                return self._submit(item)
            case "cancel":
                cut = wire.cut_from_proto(item.cancel)
                return core.cancel(item.cancel.serial, now_ns=now_ns, **cut)
            case "expire":
                return core.expire(now_ns=now_ns)
            case "worker_joined":
                joined = item.worker_joined
                spec = wire.spec_from_proto(joined.worker)
                return core.worker_joined(joined.worker_id, spec, now_ns=now_ns)
            case "worker_draining":
                core.worker_draining(item.worker_draining.worker_id)
                return []
            case "worker_lost":
                lost = item.worker_lost
                return core.worker_lost(
                    lost.worker_id, now_ns=now_ns, is_crash=lost.is_crash, reason=lost.reason
                )
            case unknown:
                raise ValueError(f"the journal has an input this version does not know: {unknown}")

    def _submit(self, item: CoreInput) -> list[Event]:
        entry, record = self._bodies[item.submit.serial]
        outputs: tuple[tuple[int, ...] | None, ...] = ()
        if item.submit.committed_tokens:
            serials = range(entry.serial, entry.serial + record.n)
            outputs = tuple(self._outputs.of(serial) for serial in serials)
        explained = item.submit.explain_from or 1
        request = wire.request_from_proto(entry, record, outputs, explained)
        return self._core.submit(request, now_ns=item.now_ns)


def _samplings(
    bodies: Mapping[Serial, tuple[InboxEntry, SubmitRecord]],
) -> Iterator[tuple[Serial, RowSampling]]:
    for serial, (_, record) in bodies.items():
        for choice in range(record.n):
            yield serial + choice, wire.sampling_of_choice(record.sampling, choice)


def _tokens(committed: Committed) -> Iterator[Token]:
    return zip(committed.serials, committed.positions, committed.tokens, strict=True)


def _compare_endings(record: JournalRecord, events: Iterable[Event]) -> Compared:
    """Who ended, why and at which length; that a request is over is said by its last choice."""
    described = attrgetter("serial", "reason", "output_tokens", "error")
    endings: list[SequenceFinished] = []
    overs: list[Serial] = []
    for event in events:
        if isinstance(event, Finished):
            endings.append(wire.finished_to_proto(event))
        else:
            overs.append(endings[-1].serial)
    recorded_overs = [ending.serial for ending in record.finished if ending.HasField("done")]
    return Compared(
        seq=record.seq,
        what="endings",
        recorded=([described(ending) for ending in record.finished], recorded_overs),
        replayed=([described(ending) for ending in endings], overs),
    )
