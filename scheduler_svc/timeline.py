"""Where the time of every request went, by what its leader's core was told and said. Pure.

What is written down as it happens are the transitions of a choice (it waits for another reason, is
scheduled, is given a chunk, has its first token, is preempted, ends), never a thing per token; and
of each worker its newest steps, once for all who were in them. Only who asks puts the two together:
intervals, each beginning where the one before ends, from the request's arrival to its end.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from heapq import nlargest
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Final, NamedTuple

from scheduler_svc.core.commands import Command, MakePlan, StepDone, Submit, WorkerLost
from scheduler_svc.core.outcome import Finished, Outcome, PassedOver, Plan, RequestOver, Why
from scheduler_svc.core.types import Request, SequenceId, SlotIndex

# Requests that are over.
OVER_MAX: Final = 4096
# Of a worker; at 50 steps a second the newest three minutes.
STEPS_MAX: Final = 8192
# Looks at the queue that found another reason than the one before, of all workers.
LOOKS_MAX: Final = 8192
# Workers that are gone take theirs with them when so many have come since.
WORKERS_MAX: Final = 64
# Of one choice: of those between its arrival and the newest, the oldest are forgotten.
TRANSITIONS_MAX: Final = 512
# Of an interval of decoding, the longest gaps between its steps.
GAPS_SHOWN: Final = 3


class Phase(Enum):
    """What a choice did."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    # Before this leader led, or too long ago: it is known only that the request was there.
    UNKNOWN = "unknown"


class Gap(NamedTuple):
    """Between two steps of a worker: when it ended, and what the step that ended it computed."""

    ended_ns: int
    gap_ns: int
    rows: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A part of a choice's time, on the ledger's clock. `why`: for what it waited, or how this
    interval began. `behind`: the choice that stood before it in the queue and could not start.
    """

    start_ns: int
    end_ns: int
    phase: Phase
    why: str = ""
    behind: SequenceId | None = None
    worker_id: str = ""
    # Of a prefill: tokens from the prefix cache, and those computed, chunk by chunk.
    num_cached_tokens: int = 0
    chunks: tuple[int, ...] = ()
    # Of decoding, as far as the worker's steps are remembered.
    num_steps: int = 0
    gap_p50_ns: int = 0
    longest: tuple[Gap, ...] = ()
    # Most rows of a step beside this one.
    batch_mates: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Of one choice, from its request's arrival until it ended, or until now."""

    id: str
    sequence_id: SequenceId
    choice: int
    ended: str
    num_preemptions: int
    intervals: tuple[Interval, ...]


class _Transition(NamedTuple):
    """From here on it is in this phase, for this reason."""

    at_ns: int
    phase: Phase
    why: str = ""
    worker_id: str = ""
    num_cached_tokens: int = 0


class _Look(NamedTuple):
    """Nobody behind `head` was looked at (None: nobody at all), and why; None: everybody was."""

    at_ns: int
    why: Why | None
    head: SequenceId | None


class _Step(NamedTuple):
    answered_ns: int
    rows: int
    prompt_tokens: int


@dataclass(eq=False, slots=True)
class _Track:
    """What is written down of one choice; not its request, which has the prompt."""

    id: str
    sequence_id: SequenceId
    choice: int
    transitions: list[_Transition] = field(default_factory=list)
    # Tokens by the number of the transition, from 1.
    chunks: dict[int, list[int]] = field(default_factory=dict)
    num_preemptions: int = 0
    end_ns: int = 0
    ended: str = ""

    def enter(self, transition: _Transition) -> None:
        """From its moment on; nothing, when that is what it does already."""
        if transition[1:] == self.transitions[-1][1:]:
            return
        if len(self.transitions) == TRANSITIONS_MAX:
            arrived_ns = self.transitions[0].at_ns
            self.transitions[:2] = [_Transition(arrived_ns, Phase.UNKNOWN, TOO_LONG_AGO)]
            self.chunks = {number - 1: some for number, some in self.chunks.items() if number > 2}
        self.transitions.append(transition)


# Of the planner, those that look at the queue.
QUEUE_STAGES: Final = ("place", "admit")
BEHIND: Final = "its turn has not come"
ON_ITS_WAY: Final = "on its way to the scheduler"
BEFORE: Final = "before this leader led"
TOO_LONG_AGO: Final = "too long ago to be told"
WORKER_LOST: Final = "its worker was lost"
LEADER_LOST: Final = "its leader was lost"
PREEMPTED: Final = "preempted"
NO_BLOCKS: Final = "too few blocks were free"


class Timelines:
    """Of the requests of one leadership, or of all that a replay is fed."""

    def __init__(self) -> None:
        self._live: dict[SequenceId, _Track] = {}
        # By the request's id, newest last.
        self._over: OrderedDict[str, list[_Track]] = OrderedDict()
        self._of: dict[str, list[_Track]] = {}
        self._steps: OrderedDict[str, deque[_Step]] = OrderedDict()
        self._looks: deque[_Look] = deque(maxlen=LOOKS_MAX)
        self._last_look: dict[str, tuple[Why | None, SequenceId | None]] = {}
        # By worker: who has which slot as of the newest plan, of those who computes a prompt, and
        # prompt tokens of the plans on their way.
        self._slots: dict[str, dict[SlotIndex, _Track]] = {}
        self._prefills: dict[str, dict[SequenceId, _Track]] = {}
        self._prompt_tokens: dict[str, dict[int, int]] = {}
        self._since_ns = self._now_ns = 0

    def take(self, command: Command, outcome: Outcome, now_ns: int) -> None:
        """What the core was told, and what came of it."""
        self._now_ns, self._since_ns = now_ns, self._since_ns or now_ns
        match command:
            case MakePlan():
                self._planned(command.worker_id, outcome, now_ns)
            case StepDone():
                self._stepped(command, outcome, now_ns)
            case Submit():
                self._submitted(command.request, now_ns)
            case WorkerLost():
                self._lost(command.worker_id, now_ns)
        for event in outcome.events:
            if isinstance(event, Finished):
                self._finished(event, now_ns)
            else:
                self._request_over(event)

    def snapshot(self, id: str) -> "Snapshot":
        """What is written down of a request, by its id in the ledger, in about a millisecond. The
        rest may take a while, and is done anywhere.
        """
        tracks = self._of.get(id) or self._over.get(id) or []
        workers = {one.worker_id for track in tracks for one in track.transitions}
        return Snapshot(
            tracks=[
                replace(
                    track,
                    transitions=[*track.transitions],
                    chunks={number: [*some] for number, some in track.chunks.items()},
                )
                for track in tracks
            ],
            steps={name: [*self._steps[name]] for name in workers & self._steps.keys()},
            looks=[*self._looks],
            now_ns=self._now_ns,
        )

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
            for track in tracks:
                if not track.ended:
                    track.enter(_Transition(now_ns, Phase.QUEUE, LEADER_LOST))
            return
        is_new = request.arrived_ns >= self._since_ns and not request.outputs
        phase, why = (Phase.QUEUE, ON_ITS_WAY) if is_new else (Phase.UNKNOWN, BEFORE)
        tracks = self._of[request.id] = []
        for choice in range(request.n):
            sequence_id = request.sequence_id + choice
            arrived = _Transition(min(request.arrived_ns, now_ns), phase, why)
            track = _Track(request.id, sequence_id, choice, [arrived])
            track.enter(_Transition(now_ns, Phase.QUEUE))
            tracks.append(track)
            self._live[sequence_id] = track

    def _lost(self, worker_id: str, now_ns: int) -> None:
        for track in self._live.values():
            if track.transitions[-1].worker_id == worker_id:
                track.enter(_Transition(now_ns, Phase.QUEUE, WORKER_LOST))
        for by_worker in (self._slots, self._prefills, self._prompt_tokens, self._last_look):
            by_worker.pop(worker_id, None)

    def _looked(self, worker_id: str, passed_over: tuple[PassedOver, ...], now_ns: int) -> None:
        named = [over for over in passed_over if over.stage in QUEUE_STAGES]
        last = (named[-1].why, named[-1].sequence_id) if named else (None, None)
        if self._last_look.get(worker_id, (None, None)) != last:
            self._last_look[worker_id] = last
            self._looks.append(_Look(now_ns, *last))
        for over in named:
            track = self._live.get(over.sequence_id or 0)
            if track is not None and track.transitions[-1].phase is Phase.QUEUE:
                track.enter(_Transition(now_ns, Phase.QUEUE, over.why.value))

    def _left(self, plan: Plan, passed_over: Iterable[PassedOver], now_ns: int) -> None:
        if not plan.preempted:
            return
        whys = {p.sequence_id: p.why.value for p in passed_over if p.stage == "give_way"}
        for sequence_id in plan.preempted:
            if (track := self._live.get(sequence_id)) is not None:
                why = whys.get(sequence_id)
                track.num_preemptions += why is None
                because = f"{PREEMPTED}: {why or NO_BLOCKS}"
                track.enter(_Transition(now_ns, Phase.QUEUE, because))
                self._prefills.get(plan.worker_id, {}).pop(sequence_id, None)

    def _joined(self, plan: Plan, now_ns: int) -> None:
        slots = self._slots.setdefault(plan.worker_id, {})
        prefills = self._prefills.setdefault(plan.worker_id, {})
        for join in plan.joins:
            if (track := self._live.get(join.sequence_id)) is not None:
                cached = join.num_computed_tokens
                track.enter(_Transition(now_ns, Phase.PREFILL, "", plan.worker_id, cached))
                slots[join.slot] = prefills[join.sequence_id] = track
        if plan.chunks:
            self._prompt_tokens.setdefault(plan.worker_id, {})[plan.plan_id] = plan.chunk_tokens
            for slot, count in plan.chunks:
                if count and (track := slots.get(slot)) is not None:
                    track.chunks.setdefault(len(track.transitions), []).append(count)

    def _stepped(self, command: StepDone, outcome: Outcome, now_ns: int) -> None:
        result, step = command.result, outcome.tokens
        assert step is not None
        worker_id = result.worker_id
        tokens_of = self._prompt_tokens.get(worker_id)
        prompt_tokens = tokens_of.pop(result.plan_id, 0) if tokens_of and not result.step else 0
        steps = self._steps.get(worker_id)
        if steps is None:
            steps = self._steps[worker_id] = deque(maxlen=STEPS_MAX)
            if len(self._steps) > WORKERS_MAX:
                self._steps.popitem(last=False)
        steps.append(_Step(now_ns, len(step.slots), prompt_tokens))
        if prefills := self._prefills.get(worker_id):
            for sequence_id in prefills.keys() & set(step.sequence_ids):
                prefills.pop(sequence_id).enter(_Transition(now_ns, Phase.DECODE, "", worker_id))

    def _finished(self, event: Finished, now_ns: int) -> None:
        track = self._live.pop(event.sequence_id, None)
        if track is not None:
            track.ended, track.end_ns = event.reason.value, now_ns
            self._prefills.get(track.transitions[-1].worker_id, {}).pop(event.sequence_id, None)

    def _request_over(self, event: RequestOver) -> None:
        tracks = self._of.pop(event.id, None)
        if tracks is not None:
            self._over[event.id] = tracks
            if len(self._over) > OVER_MAX:
                self._over.popitem(last=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Of one request. It shares nothing that changes."""

    tracks: Sequence[_Track]
    # By worker; and of the cell.
    steps: Mapping[str, Sequence[_Step]]
    looks: Sequence[_Look]
    now_ns: int

    def timelines(self) -> tuple[Timeline, ...]:
        """Of every choice; empty: the request is not known, or not any more."""
        return tuple(self._timeline(track) for track in self.tracks)

    def _timeline(self, track: _Track) -> Timeline:
        last_ns = track.transitions[-1].at_ns
        end_ns = track.end_ns if track.ended else max(self.now_ns, last_ns)
        transitions = [*track.transitions, _Transition(end_ns, Phase.UNKNOWN)]
        intervals: list[Interval] = []
        for number, (one, after) in enumerate(pairwise(transitions), start=1):
            if one.phase is Phase.QUEUE and not one.why:
                intervals += self._queued(one.at_ns, after.at_ns)
            elif after.at_ns > one.at_ns:
                intervals.append(self._interval(one, after.at_ns, track.chunks.get(number, ())))
        return Timeline(
            id=track.id,
            sequence_id=track.sequence_id,
            choice=track.choice,
            ended=track.ended,
            num_preemptions=track.num_preemptions,
            intervals=tuple(intervals),
        )

    def _queued(self, start_ns: int, end_ns: int) -> Iterator[Interval]:
        """No look at the queue named it: others stood before it, and this is why they did."""
        first = bisect_right(self.looks, start_ns, key=_at_ns)
        before = self.looks[first - 1] if first else None
        last = bisect_left(self.looks, end_ns, lo=first, key=_at_ns)
        for look in [*self.looks[first:last], _Look(end_ns, None, None)]:
            if look.at_ns > start_ns:
                yield Interval(
                    start_ns=start_ns,
                    end_ns=look.at_ns,
                    phase=Phase.QUEUE,
                    why=before.why.value if before and before.why else BEHIND,
                    behind=before.head if before else None,
                )
            start_ns, before = look.at_ns, look

    def _interval(self, one: _Transition, end_ns: int, chunks: Iterable[int]) -> Interval:
        steps = self.steps.get(one.worker_id, ())
        first = bisect_left(steps, one.at_ns, key=_answered_ns)
        steps = steps[first : bisect_right(steps, end_ns, lo=first, key=_answered_ns)]
        is_decode = one.phase is Phase.DECODE
        gaps = [(b.answered_ns - a.answered_ns, b) for a, b in pairwise(steps)] if is_decode else []
        return Interval(
            start_ns=one.at_ns,
            end_ns=end_ns,
            phase=one.phase,
            why=one.why,
            worker_id=one.worker_id,
            num_cached_tokens=one.num_cached_tokens,
            chunks=tuple(chunks),
            num_steps=len(steps) - is_decode if steps else 0,
            gap_p50_ns=round(median(gap_ns for gap_ns, _ in gaps)) if gaps else 0,
            longest=tuple(
                Gap(step.answered_ns, gap_ns, step.rows, step.prompt_tokens)
                for gap_ns, step in nlargest(GAPS_SHOWN, gaps)
            ),
            batch_mates=max((step.rows - 1 for step in steps), default=0),
        )


_at_ns = attrgetter("at_ns")
_answered_ns = attrgetter("answered_ns")
