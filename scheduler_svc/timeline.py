"""Where the time of every request went, by what its leader's core was told and said. Pure.

What is written down as it happens are turns in the life of a choice (it waits for another reason,
joins, is given a chunk, has its first token, leaves, ends), never a thing per token; and of each
worker its newest steps, once for all who were in them. Only who asks puts the two together: a list
of intervals, each beginning where the one before ends, from the request's arrival to its end.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from scheduler_svc.core.commands import Command, MakePlan, StepDone, Submit, WorkerLost
from scheduler_svc.core.outcome import Finished, Outcome, PassedOver, Plan, RequestOver, Why
from scheduler_svc.core.types import Request, SequenceId, SlotIndex

# Requests that are over: their lives take about 1 kB each.
OVER_MAX: Final = 4096
# Of a worker; at 50 steps a second the newest three minutes.
STEPS_MAX: Final = 8192
# Looks at the queue that found another reason than the one before, of all workers.
LOOKS_MAX: Final = 8192
# Workers that are gone take theirs with them when so many have come since.
WORKERS_MAX: Final = 64
# Of one choice; the reasons for which it waits beyond these are one, the last.
TURNS_MAX: Final = 512
# Of an interval of decoding, the longest gaps between its steps.
GAPS_SHOWN: Final = 3


class Phase(Enum):
    """What a choice did."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    # Before this leader led: it is known only that the request was there.
    UNKNOWN = "unknown"


class Gap(NamedTuple):
    """Between two steps of a worker: when it ended, and what the step that ended it computed."""

    ended_ns: int
    gap_ns: int
    rows: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A part of a choice's life, on the ledger's clock. `why`: for what it waited, or how this
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
class Life:
    """One choice, from its request's arrival until `end_ns`, or until now."""

    id: str
    sequence_id: SequenceId
    choice: int
    ended: str
    num_preemptions: int
    intervals: tuple[Interval, ...]


class _Turn(NamedTuple):
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
    turns: list[_Turn] = field(default_factory=list)
    # By the number of the turn.
    chunks: dict[int, list[int]] = field(default_factory=dict)
    num_preemptions: int = 0
    end_ns: int = 0
    ended: str = ""

    def turn(self, turn: _Turn) -> None:
        last = self.turns[-1]
        if turn[1:] != last[1:] and (len(self.turns) < TURNS_MAX or turn.phase is not last.phase):
            self.turns.append(turn)


# Of the planner, those that look at the queue.
QUEUE_STAGES: Final = ("place", "admit")
BEHIND: Final = "its turn has not come"
ON_ITS_WAY: Final = "on its way to the scheduler"
BEFORE: Final = "before this leader led"
WORKER_LOST: Final = "its worker was lost"
LEADER_LOST: Final = "its leader was lost"
FOR_OTHERS: Final = "preempted: too few blocks were free"
GAVE_WAY: Final = "gave way"


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
        # By worker: who computes a prompt, and prompt tokens of the plans on their way.
        self._prefills: dict[str, dict[SlotIndex, _Track]] = {}
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

    def lives(self, id: str) -> tuple[Life, ...]:
        """Of every choice of a request, by its id in the ledger; empty: it is not known, or not any
        more.
        """
        tracks = self._of.get(id) or self._over.get(id) or []
        return tuple(self._life(track) for track in tracks)

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
                    track.turn(_Turn(now_ns, Phase.QUEUE, LEADER_LOST))
            return
        is_new = request.arrived_ns >= self._since_ns and not request.outputs
        phase, why = (Phase.QUEUE, ON_ITS_WAY) if is_new else (Phase.UNKNOWN, BEFORE)
        tracks = self._of[request.id] = []
        for choice in range(request.n):
            sequence_id = request.sequence_id + choice
            arrived = _Turn(min(request.arrived_ns, now_ns), phase, why)
            track = _Track(request.id, sequence_id, choice, [arrived])
            track.turn(_Turn(now_ns, Phase.QUEUE))
            tracks.append(track)
            self._live[sequence_id] = track

    def _lost(self, worker_id: str, now_ns: int) -> None:
        for track in self._live.values():
            if track.turns[-1].worker_id == worker_id:
                track.turn(_Turn(now_ns, Phase.QUEUE, WORKER_LOST))
        self._prefills.pop(worker_id, None)
        self._prompt_tokens.pop(worker_id, None)
        self._last_look.pop(worker_id, None)

    def _looked(self, worker_id: str, passed_over: tuple[PassedOver, ...], now_ns: int) -> None:
        named = [over for over in passed_over if over.stage in QUEUE_STAGES]
        last = (named[-1].why, named[-1].sequence_id) if named else (None, None)
        if self._last_look.get(worker_id, (None, None)) != last:
            self._last_look[worker_id] = last
            self._looks.append(_Look(now_ns, *last))
        for over in named:
            track = self._live.get(over.sequence_id or 0)
            if track is not None and track.turns[-1].phase is Phase.QUEUE:
                track.turn(_Turn(now_ns, Phase.QUEUE, over.why.value))

    def _left(self, plan: Plan, passed_over: Iterable[PassedOver], now_ns: int) -> None:
        if not plan.preempted:
            return
        whys = {p.sequence_id: p.why.value for p in passed_over if p.stage == "give_way"}
        for sequence_id in plan.preempted:
            if (track := self._live.get(sequence_id)) is not None:
                why = whys.get(sequence_id)
                track.num_preemptions += why is None
                because = f"{GAVE_WAY}: {why}" if why else FOR_OTHERS
                track.turn(_Turn(now_ns, Phase.QUEUE, because))
                self._forget_prefill(plan.worker_id, track)

    def _joined(self, plan: Plan, now_ns: int) -> None:
        prefills = self._prefills.setdefault(plan.worker_id, {})
        for join in plan.joins:
            if (track := self._live.get(join.sequence_id)) is not None:
                cached = join.num_computed_tokens
                track.turn(_Turn(now_ns, Phase.PREFILL, "", plan.worker_id, cached))
                prefills[join.slot] = track
        if plan.chunks:
            self._prompt_tokens.setdefault(plan.worker_id, {})[plan.plan_id] = plan.chunk_tokens
            for slot, count in plan.chunks:
                if count and (track := prefills.get(slot)) is not None:
                    track.chunks.setdefault(len(track.turns), []).append(count)

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
            for slot in prefills.keys() & set(step.slots):
                prefills.pop(slot).turn(_Turn(now_ns, Phase.DECODE, "", worker_id))

    def _finished(self, event: Finished, now_ns: int) -> None:
        track = self._live.pop(event.sequence_id, None)
        if track is not None:
            track.ended, track.end_ns = event.reason.value, now_ns
            self._forget_prefill(track.turns[-1].worker_id, track)

    def _forget_prefill(self, worker_id: str, track: _Track) -> None:
        prefills = self._prefills.get(worker_id, {})
        for slot in [slot for slot, other in prefills.items() if other is track]:
            del prefills[slot]

    def _request_over(self, event: RequestOver) -> None:
        tracks = self._of.pop(event.id, None)
        if tracks is not None:
            self._over[event.id] = tracks
            if len(self._over) > OVER_MAX:
                self._over.popitem(last=False)

    # Answers

    def _life(self, track: _Track) -> Life:
        end_ns = track.end_ns if track.ended else max(self._now_ns, track.turns[-1].at_ns)
        turns = [*track.turns, _Turn(end_ns, Phase.UNKNOWN)]
        intervals: list[Interval] = []
        for number, (turn, after) in enumerate(pairwise(turns), start=1):
            if turn.phase is Phase.QUEUE and not turn.why:
                intervals += self._queued(turn.at_ns, after.at_ns)
            elif after.at_ns > turn.at_ns:
                intervals.append(self._interval(turn, after.at_ns, track.chunks.get(number, ())))
        return Life(
            id=track.id,
            sequence_id=track.sequence_id,
            choice=track.choice,
            ended=track.ended,
            num_preemptions=track.num_preemptions,
            intervals=tuple(intervals),
        )

    def _queued(self, start_ns: int, end_ns: int) -> Iterator[Interval]:
        """No look at the queue named it: others stood before it, and this is why they did."""
        why, behind = BEHIND, None
        for look in self._looks:
            if look.at_ns >= end_ns:
                break
            if look.at_ns > start_ns:
                yield Interval(
                    start_ns=start_ns, end_ns=look.at_ns, phase=Phase.QUEUE, why=why, behind=behind
                )
                start_ns = look.at_ns
            why, behind = look.why.value if look.why else BEHIND, look.head
        if end_ns > start_ns:
            yield Interval(
                start_ns=start_ns, end_ns=end_ns, phase=Phase.QUEUE, why=why, behind=behind
            )

    def _interval(self, turn: _Turn, end_ns: int, chunks: Iterable[int]) -> Interval:
        steps = self._between(turn, end_ns) if turn.worker_id else []
        gaps = [
            Gap(after.answered_ns, after.answered_ns - before.answered_ns, *after[1:])
            for before, after in pairwise(steps)
        ]
        is_decode = turn.phase is Phase.DECODE
        longest = sorted(gaps, key=lambda gap: gap.gap_ns, reverse=True)[:GAPS_SHOWN]
        return Interval(
            start_ns=turn.at_ns,
            end_ns=end_ns,
            phase=turn.phase,
            why=turn.why,
            worker_id=turn.worker_id,
            num_cached_tokens=turn.num_cached_tokens,
            chunks=tuple(chunks),
            num_steps=len(steps) - is_decode if steps else 0,
            gap_p50_ns=round(median(gap.gap_ns for gap in gaps)) if gaps and is_decode else 0,
            longest=tuple(longest) if is_decode else (),
            batch_mates=max((step.rows - 1 for step in steps), default=0),
        )

    def _between(self, turn: _Turn, end_ns: int) -> list[_Step]:
        steps = self._steps.get(turn.worker_id, ())
        return [step for step in steps if turn.at_ns <= step.answered_ns <= end_ns]
