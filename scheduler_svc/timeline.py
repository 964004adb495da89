"""Where the time of every request went, by what its leader's core was told and said. Pure.

What is written down as it happens are the transitions of a choice (it waits for another reason, is
scheduled, is given a chunk, has its first token, is preempted, ends), never a thing per token; of
each worker its newest steps, once for all who were in them; and when nothing could be planned, for
whom. Only who asks puts these together (`timeline_intervals`).
"""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile
from typing import Final

from scheduler_svc.core.commands import (
    Command,
    MakePlan,
    StepDone,
    StoreBehind,
    Submit,
    WorkerDraining,
    WorkerJoined,
    WorkerLate,
    WorkerLost,
)
from scheduler_svc.core.outcome import Finished, Outcome, PassedOver, Plan, Why
from scheduler_svc.core.types import Request, SequenceId, SlotIndex
from scheduler_svc.core.waiting import WaitingQueue
from scheduler_svc.timeline_snapshot import (
    SNAPSHOT_CHOICES_MAX,
    SNAPSHOT_STEPS_MAX,
    TimelineSnapshot,
    WorkerSnapshot,
)
from scheduler_svc.timeline_track import (
    BEFORE,
    LEADER_LOST,
    NO_BLOCKS,
    NO_WORKER,
    NOT_ARCHIVED,
    ON_ITS_WAY,
    PREEMPTED,
    QUEUE_STAGES,
    WORKER_LOST,
    Look,
    Other,
    Phase,
    Snapshot,
    Step,
    Track,
    Transition,
    blocks_of,
)
from scheduler_svc.timeline_windows import Window, Windows, windows_of

# Requests that are over.
OVER_MAX: Final = 4096
# Of a worker; at 50 steps a second the newest three minutes.
STEPS_MAX: Final = 8192
# Looks at the queue that found another reason than the one before, of all workers.
LOOKS_MAX: Final = 8192
# Workers that are gone take theirs with them when so many have come since.
WORKERS_MAX: Final = 64
# Tenants that were throttled of late.
TENANTS_MAX: Final = 1024
# Choices that are looked at for who was beside one, and requests of those that are told.
MATES_LOOKED_AT_MAX: Final = 4096
MATES_TOLD_MAX: Final = 32
# For so long nothing was acknowledged, and nobody told what was computed: clients see a stall.
STORE_SILENT_NS: Final = 200_000_000


class Timelines:
    """Of the requests of one leadership, or of all that a replay is fed."""

    def __init__(self) -> None:
        self._live: dict[SequenceId, Track] = {}
        # By the request's id, newest last.
        self._over: OrderedDict[str, list[Track]] = OrderedDict()
        self._of: dict[str, list[Track]] = {}
        # Ended, and not known to be committed.
        self._uncommitted: deque[Track] = deque(maxlen=OVER_MAX)
        self._steps: OrderedDict[str, deque[Step]] = OrderedDict()
        self._looks: deque[Look] = deque(maxlen=LOOKS_MAX)
        self._last_look: dict[str, tuple[str, SequenceId | None]] = {}
        self._store, self._silent, self._closed = Windows(), Windows(), Windows()
        self._acknowledged_ns = 0
        self._late: OrderedDict[str, Windows] = OrderedDict()
        self._throttled: OrderedDict[str, Windows] = OrderedDict()
        self._throttled_now: frozenset[str] = frozenset()
        # Whose queue it is of, and as of which of its changes.
        self._throttled_of: tuple[WaitingQueue | None, int] = (None, 0)
        # Of the workers that are here, those that take nobody; why.
        self._block_size: dict[str, int] = {}
        self._not_open: dict[str, str] = {}
        # By worker: who has which slot as of the newest plan, of those who computes a prompt, and
        # prompt tokens of the plans on their way, with whose are the most.
        self._slots: dict[str, dict[SlotIndex, Track]] = {}
        self._prefills: dict[str, dict[SequenceId, Track]] = {}
        self._prompt_tokens: dict[str, dict[int, tuple[int, SequenceId | None]]] = {}
        self._since_ns = self._now_ns = self._lost_ns = 0

    def take(
        self,
        command: Command,
        outcome: Outcome,
        now_ns: int,
        waiting: WaitingQueue | None = None,
    ) -> None:
        """What the core was told, and what came of it; `waiting`: its queue by now, for whose next
        request waits for their own running ones; None: as before.
        """
        if not self._since_ns:
            self._since_ns = now_ns
            self._note_closed(now_ns)
        self._now_ns = now_ns
        match command:
            case MakePlan():
                self._planned(command.worker_id, outcome, now_ns)
            case StepDone():
                assert outcome.tokens is not None
                result, ids = command.result, outcome.tokens.sequence_ids
                step = Step(now_ns, result.plan_id, len({*ids}), step_us=result.step_us)
                self.stepped(result.worker_id, result.step, step, ids)
            case Submit():
                self._submitted(command.request, now_ns)
            case StoreBehind():
                self._store.set(now_ns, Why.STORE_BEHIND.value if command.is_behind else "")
            case WorkerJoined() | WorkerLate() | WorkerDraining() | WorkerLost():
                self._worker(command, now_ns)
        if waiting is not None and (of := (waiting, waiting.num_throttlings)) != self._throttled_of:
            self._throttled_of = of
            self.note_throttled(frozenset(tenant.name for tenant in waiting.throttled), now_ns)
        for event in outcome.events:
            if isinstance(event, Finished):
                self.finished(event, now_ns)
            else:
                self.request_over(event.id)

    def stepped(self, worker_id: str, index: int, step: Step, ids: Sequence[SequenceId]) -> None:
        """A worker has answered this step of a plan, of which nothing is said of prompts; `ids`:
        whose each token is.
        """
        now_ns = self._now_ns = step.answered_ns
        prompts = self._prompt_tokens.get(worker_id)
        if prompts and not index and (prompt := prompts.pop(step.plan_id, None)) is not None:
            step = step._replace(prompt_tokens=prompt[0], largest=prompt[1])
        steps = self._steps.get(worker_id)
        if steps is None:
            steps = self._steps[worker_id] = deque(maxlen=STEPS_MAX)
            if len(self._steps) > WORKERS_MAX:
                self._steps.popitem(last=False)
        steps.append(step)
        if self._not_open.get(worker_id) == Why.LATE.value:
            del self._not_open[worker_id]
            self._late[worker_id].set(now_ns, "")
            self._note_closed(now_ns)
        if prefills := self._prefills.get(worker_id):
            for one in prefills.keys() & set(ids):
                prefills.pop(one).enter(Transition(now_ns, Phase.DECODE, "", worker_id))

    def note_throttled(self, names: frozenset[str], now_ns: int) -> None:
        """Tenants whose next request waits for their own running ones by now."""
        for name in names ^ self._throttled_now:
            windows = windows_of(self._throttled, name, TENANTS_MAX)
            windows.set(now_ns, Why.TENANT.value if name in names else "")
        self._throttled_now = names

    def finished(self, event: Finished, now_ns: int) -> None:
        """A choice has ended."""
        if (track := self._live.pop(event.sequence_id, None)) is not None:
            track.ended, track.end_ns = event.reason.value, now_ns
            self._uncommitted.append(track)
            self._prefills.get(track.transitions[-1].worker_id, {}).pop(event.sequence_id, None)

    def request_over(self, id: str) -> None:
        """Every choice of it has ended."""
        tracks = self._of.pop(id, None)
        if tracks is not None:
            self._over[id] = tracks
            if len(self._over) > OVER_MAX:
                self._over.popitem(last=False)

    def committed(self, first_ns: int, last_ns: int, now_ns: int) -> None:
        """The store has acknowledged all that was decided from here to there. Who leads knows; a
        replay does not.
        """
        # Late one by one, acknowledgements keep nobody waiting but for the last: computing goes on.
        silent_ns = max(first_ns, self._acknowledged_ns)
        if now_ns - silent_ns >= STORE_SILENT_NS:
            self._silent.add(Window(silent_ns, now_ns, Why.STORE_BEHIND.value))
        self._acknowledged_ns = now_ns
        while self._uncommitted and self._uncommitted[0].end_ns <= last_ns:
            self._uncommitted.popleft().committed_ns = now_ns

    def leader_lost_at(self, lost_ns: int) -> None:
        """The leader before decided nothing any more from then on. Before any command."""
        self._lost_ns = lost_ns

    def lead_anew(self, now_ns: int) -> None:
        """Another leader's commands begin. Its workers have yet to come; what came last is lost."""
        self._block_size.clear()
        self._not_open.clear()
        for windows in (self._store, *self._late.values()):
            windows.set(now_ns, "")
        self.note_throttled(frozenset(), now_ns)
        self._lost_ns, self._since_ns = self._now_ns, self._since_ns or now_ns
        self._note_closed(now_ns)

    def tracks(self, id: str) -> Sequence[Track]:
        """Of a request's choices, by its id in the ledger. Of one that is over they stay as they
        are, but for the commit.
        """
        return self._of.get(id) or self._over.get(id) or ()

    def snapshot(self, id: str, now_ns: int = 0) -> Snapshot:
        """What is written down of a request, by its id in the ledger, in a few milliseconds where
        thousands live. The rest may take a while, and is done anywhere. What lives has lived until
        now, or until the last command, where that is all that is known.
        """
        now_ns = max(now_ns, self._now_ns)
        tracks = self.tracks(id)
        workers = {one.worker_id for track in tracks for one in track.transitions}
        throttled = self._throttled.get(tracks[0].tenant) if tracks else None
        return Snapshot(
            tracks=tuple(
                replace(
                    track,
                    transitions=[*track.transitions],
                    chunks=[*track.chunks],
                    sat_out=track.sat_out.copy(),
                )
                for track in tracks
            ),
            steps={name: [*self._steps[name]] for name in workers & self._steps.keys()},
            looks=[*self._looks],
            store=self._store.until(now_ns),
            silent=self._silent.until(now_ns),
            closed=self._closed.until(now_ns),
            late={w: self._late[w].until(now_ns) for w in workers & self._late.keys()},
            throttled=[] if throttled is None else throttled.until(now_ns),
            others=self._others(tracks, now_ns),
            now_ns=now_ns,
        )

    def _others(self, tracks: Sequence[Track], now_ns: int) -> list[Other]:
        """Those who live, and of those who are over the newest, as far back as these go."""
        first_ns = min((track.transitions[0].at_ns for track in tracks), default=now_ns)
        ids = {track.id for track in tracks}
        latest = reversed(self._over.values())
        over = takewhile(lambda some: max(one.end_ns for one in some) >= first_ns, latest)
        looked_at = islice(chain(self._live.values(), *over), MATES_LOOKED_AT_MAX)
        return [
            Other(each.id, [*each.transitions], each.end_ns or now_ns)
            for each in looked_at
            if each.id not in ids
        ]

    def names(self, ids: Collection[SequenceId]) -> Mapping[SequenceId, str]:
        """Whose choices these are, as far as it is remembered."""
        if not ids:
            return {}
        others = chain(self._live.values(), chain.from_iterable(reversed(self._over.values())))
        known = islice(others, MATES_LOOKED_AT_MAX)
        return {track.sequence_id: track.id for track in known if track.sequence_id in ids}

    # Where a reader begins

    def snapshot_all(self) -> TimelineSnapshot:
        """What a reader must know of now who begins behind it, in a millisecond where thousands
        live.
        """
        slots = chain.from_iterable(slots.values() for slots in self._slots.values())
        on_workers = (track for track in slots if track.sequence_id in self._live)
        told = [*islice(self._live.values(), SNAPSHOT_CHOICES_MAX)]
        if is_cut := len(told) < len(self._live):
            told = [*dict.fromkeys(chain(told, on_workers))]
        names = dict.fromkeys(chain(self._not_open, self._steps, self._block_size))
        throttled = ((name, self._throttled[name].since_ns) for name in self._throttled_now)
        return TimelineSnapshot(
            now_ns=self._now_ns,
            since_ns=self._since_ns,
            lost_ns=self._lost_ns,
            # Without a tuple of ours for each: of thousands that is most of what it takes.
            live=tuple(
                zip(
                    told,
                    [track.transitions[-1] for track in told],
                    [track.num_preemptions for track in told],
                    strict=True,
                )
            ),
            is_cut=is_cut,
            workers={name: self._worker_snapshot(name) for name in names},
            look=self._looks[-1] if self._looks else None,
            store_behind_ns=self._store.since_ns,
            closed_ns=self._closed.since_ns,
            closed_why=self._closed.why,
            throttled_ns=dict(sorted(throttled)),
        )

    def _worker_snapshot(self, name: str) -> WorkerSnapshot:
        late, steps = self._late.get(name), self._steps.get(name, ())
        return WorkerSnapshot(
            block_size=self._block_size.get(name, 0),
            closed_why=self._not_open.get(name, ""),
            late_ns=late.since_ns if late is not None else 0,
            look=self._last_look.get(name),
            steps=tuple(islice(reversed(steps), SNAPSHOT_STEPS_MAX))[::-1],
            slots={
                slot: track.sequence_id
                for slot, track in self._slots.get(name, {}).items()
                if track.sequence_id in self._live and track.transitions[-1].worker_id == name
            },
            prompt_tokens=dict(self._prompt_tokens.get(name, {})),
        )

    def restore(self, snapshot: TimelineSnapshot) -> None:
        """Go on from there. What lived before did nobody knows what since the last command."""
        for track in self._live.values():
            track.enter(Transition(self._now_ns, Phase.UNKNOWN, NOT_ARCHIVED))
        before, self._live = self._live, {}
        for track, newest, num_preemptions in snapshot.live:
            if (own := before.get(track.sequence_id)) is None:
                own = track
                self._of.setdefault(own.id, []).append(own)
            own.enter(newest._replace(at_ns=snapshot.now_ns))
            own.num_preemptions = num_preemptions
            self._live[own.sequence_id] = own
        self._restore_closed(snapshot, self._now_ns)
        for by_worker in (self._slots, self._prefills, self._prompt_tokens, self._last_look):
            by_worker.clear()
        for name, worker in snapshot.workers.items():
            self._restore_worker(name, worker)
        look = snapshot.look
        if look is not None and (not self._looks or look.at_ns > self._looks[-1].at_ns):
            self._looks.append(look)
        self._now_ns, self._lost_ns = snapshot.now_ns, snapshot.lost_ns
        self._since_ns = self._since_ns or snapshot.since_ns

    def _restore_closed(self, snapshot: TimelineSnapshot, lost_ns: int) -> None:
        """Who could not be planned for, and who still cannot."""
        self._block_size = {n: w.block_size for n, w in snapshot.workers.items() if w.block_size}
        self._not_open = {n: w.closed_why for n, w in snapshot.workers.items() if w.closed_why}
        self._store.begin(lost_ns, snapshot.store_behind_ns, Why.STORE_BEHIND.value)
        self._closed.begin(lost_ns, snapshot.closed_ns, snapshot.closed_why)
        for windows in (*self._late.values(), *self._throttled.values()):
            windows.set(lost_ns, "")
        for name, worker in snapshot.workers.items():
            if since_ns := worker.late_ns:
                late = windows_of(self._late, name, WORKERS_MAX)
                late.begin(lost_ns, since_ns, Why.LATE.value)
        for name, since_ns in snapshot.throttled_ns.items():
            throttled = windows_of(self._throttled, name, TENANTS_MAX)
            throttled.begin(lost_ns, since_ns, Why.TENANT.value)
        self._throttled_now = frozenset(snapshot.throttled_ns)

    def _restore_worker(self, name: str, worker: WorkerSnapshot) -> None:
        live = self._live
        self._slots[name] = {slot: live[one] for slot, one in worker.slots.items() if one in live}
        self._prefills[name] = {
            one: track
            for one, track in ((one, live[one]) for one in worker.slots.values() if one in live)
            if track.transitions[-1].phase is Phase.PREFILL
        }
        self._prompt_tokens[name] = dict(worker.prompt_tokens)
        if worker.look is not None:
            self._last_look[name] = worker.look
        if worker.steps:
            steps = self._steps.setdefault(name, deque(maxlen=STEPS_MAX))
            newest_ns = steps[-1].answered_ns if steps else 0
            steps.extend(step for step in worker.steps if step.answered_ns > newest_ns)

    # Commands

    def _planned(self, worker_id: str, outcome: Outcome, now_ns: int) -> None:
        passed_over = outcome.passed_over
        if outcome.plan is not None or (passed_over and passed_over[0].stage != "plan"):
            self._looked(worker_id, passed_over, now_ns)
        if (plan := outcome.plan) is not None:
            self._left(plan, passed_over, now_ns)
            self._joined(plan, now_ns)

    def _submitted(self, request: Request, now_ns: int) -> None:
        if (tracks := self._of.get(request.id)) is not None:
            for track in [track for track in tracks if not track.ended]:
                track.enter(Transition(now_ns, Phase.QUEUE, LEADER_LOST))
            return
        is_new = request.arrived_ns >= self._since_ns and not request.outputs
        phase, why = (Phase.QUEUE, ON_ITS_WAY) if is_new else (Phase.UNKNOWN, BEFORE)
        tracks, lost_ns = self._of.setdefault(request.id, []), self._lost_ns or now_ns
        for choice in range(request.n):
            sequence_id = request.sequence_id + choice
            arrived = Transition(min(request.arrived_ns, now_ns), phase, why)
            lost = Transition(max(arrived.at_ns, lost_ns), Phase.QUEUE, LEADER_LOST)
            began = [arrived] if is_new else [arrived, lost]
            track = Track(request.id, request.tenant, sequence_id, choice, began)
            track.enter(Transition(now_ns, Phase.QUEUE))
            tracks.append(track)
            self._live[sequence_id] = track

    def _worker(
        self, command: WorkerJoined | WorkerLate | WorkerDraining | WorkerLost, now_ns: int
    ) -> None:
        worker_id = command.worker_id
        match command:
            case WorkerJoined():
                self._block_size[worker_id] = command.spec.block_size
            case WorkerLate():
                self._not_open.setdefault(worker_id, Why.LATE.value)
                windows_of(self._late, worker_id, WORKERS_MAX).set(now_ns, Why.LATE.value)
            case WorkerDraining():
                self._not_open[worker_id] = Why.DRAINING.value
            case WorkerLost():
                self._lost(worker_id, now_ns)
        self._note_closed(now_ns)

    def _lost(self, worker_id: str, now_ns: int) -> None:
        for track in self._live.values():
            if track.transitions[-1].worker_id == worker_id:
                track.enter(Transition(now_ns, Phase.QUEUE, WORKER_LOST))
        if worker_id in self._late:
            self._late[worker_id].set(now_ns, "")
        for by_worker in (
            *(self._slots, self._prefills, self._prompt_tokens, self._last_look),
            *(self._block_size, self._not_open),
        ):
            by_worker.pop(worker_id, None)

    def _note_closed(self, now_ns: int) -> None:
        """Whether somebody could join a worker at all."""
        why = ""
        if self._not_open.keys() >= self._block_size.keys():
            why = next(iter(self._not_open.values()), NO_WORKER)
        self._closed.set(now_ns, why)

    def _looked(self, worker_id: str, passed_over: tuple[PassedOver, ...], now_ns: int) -> None:
        named = [over for over in passed_over if over.stage in QUEUE_STAGES]
        last = (named[-1].why.value, named[-1].sequence_id) if named else ("", None)
        if self._last_look.get(worker_id, ("", None)) != last:
            self._last_look[worker_id] = last
            self._looks.append(Look(now_ns, *last))
        for over in named:
            track = self._live.get(over.sequence_id or 0)
            if track is not None and (newest := track.transitions[-1]).phase is Phase.QUEUE:
                again = f"{PREEMPTED}: " if newest.why.startswith(PREEMPTED) else ""
                track.enter(Transition(now_ns, Phase.QUEUE, again + over.why.value))

    def _left(self, plan: Plan, passed_over: Iterable[PassedOver], now_ns: int) -> None:
        if not plan.preempted:
            return
        whys = {p.sequence_id: p.why.value for p in passed_over if p.stage == "give_way"}
        for sequence_id in plan.preempted:
            if (track := self._live.get(sequence_id)) is not None:
                why = whys.get(sequence_id)
                track.num_preemptions += why is None
                because = f"{PREEMPTED}: {why or NO_BLOCKS}"
                track.enter(Transition(now_ns, Phase.QUEUE, because))
                self._prefills.get(plan.worker_id, {}).pop(sequence_id, None)

    def _joined(self, plan: Plan, now_ns: int) -> None:
        worker_id = plan.worker_id
        slots = self._slots.setdefault(worker_id, {})
        prefills = self._prefills.setdefault(worker_id, {})
        for join in plan.joins:
            if (track := self._live.get(join.sequence_id)) is not None:
                blocks = blocks_of(join, self._block_size.get(worker_id, 1), plan.swaps)
                cached = join.num_computed_tokens
                track.enter(Transition(now_ns, Phase.PREFILL, "", worker_id, cached, blocks))
                slots[join.slot] = prefills[join.sequence_id] = track
        if plan.chunks:
            self._chunked(plan, slots, now_ns)

    def _chunked(self, plan: Plan, slots: Mapping[SlotIndex, Track], now_ns: int) -> None:
        for slot, count in plan.chunks:
            track = slots.get(slot)
            if track is not None and count:
                track.chunks.append((track.transitions[-1].at_ns, now_ns, count))
            elif track is not None:
                track.sat_out.append((plan.worker_id, plan.plan_id))
        slot, count = max(plan.chunks, key=lambda chunk: chunk[1])
        if count:
            largest = slots[slot].sequence_id if slot in slots else None
            of_worker = self._prompt_tokens.setdefault(plan.worker_id, {})
            of_worker[plan.plan_id] = (plan.chunk_tokens, largest)
