"""A request's time as intervals, each beginning where the one before ends. Pure.

Put together of what `timeline` wrote down, for whoever asks: from the request's arrival until the
store had its end, or until now. Time in which something that had begun did not get on stands apart,
with whose doing it was.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Final, NamedTuple

from scheduler_svc.core.outcome import Why
from scheduler_svc.core.types import SequenceId
from scheduler_svc.timeline import MATES_TOLD_MAX
from scheduler_svc.timeline_track import (
    BEHIND,
    LEADER_LOST,
    NO_JOIN,
    ON_ITS_WAY,
    STEPS_BEFORE,
    WORKER_LOST,
    JoinBlocks,
    Look,
    Phase,
    Snapshot,
    Stay,
    Step,
    Track,
    Transition,
    stays_of,
)
from scheduler_svc.timeline_windows import Window

# Of an interval of decoding, the longest gaps between its steps.
GAPS_SHOWN: Final = 3
# A gap is a stall when it is so many times the median, and so long.
STALL_TIMES: Final = 3
STALL_NS_MIN: Final = 10_000_000
# Of one interval of decoding, the longest; the others stay in it.
STALLS_MAX: Final = 16

ANOTHER_PROMPT: Final = "another's prompt was computed beside it"
LONG_STEP: Final = "a step of its worker took that long"
NO_STEP: Final = "its worker had no plan, or its answer was on the way"
SAT_OUT: Final = "prompts are computed first, which is the policy's doing"
NO_ANSWER: Final = "its worker has not answered"
UNACKNOWLEDGED: Final = "the store had not acknowledged its end"


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
    # When it joined.
    blocks: JoinBlocks = NO_JOIN
    # Of decoding, as far as the worker's steps are remembered.
    num_steps: int = 0
    gap_p50_ns: int = 0
    longest: tuple[Gap, ...] = ()
    # Most rows of a step beside this one.
    batch_mates: int = 0
    # Of a stall: whose prompt was computed meanwhile.
    stalled_by: SequenceId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Of one choice, from its request's arrival until its end was committed, or until now."""

    id: str
    sequence_id: SequenceId
    choice: int
    ended: str
    num_preemptions: int
    intervals: tuple[Interval, ...]
    # Requests that had a slot beside it, and the first of them.
    num_mates: int
    mates: tuple[str, ...]


def timelines_of(snapshot: Snapshot) -> tuple[Timeline, ...]:
    """Of every choice; empty: the request is not known, or not any more."""
    mates = _mates_of(snapshot)
    return tuple(_timeline(snapshot, track, mates) for track in snapshot.tracks)


def mentioned(timelines: Iterable[Timeline]) -> set[SequenceId]:
    """Others of whom they tell: who stood before one of these, and who stalled it."""
    intervals = [interval for timeline in timelines for interval in timeline.intervals]
    told = {interval.behind for interval in intervals} | {each.stalled_by for each in intervals}
    return {one for one in told if one is not None}


def _mates_of(snapshot: Snapshot) -> tuple[str, ...]:
    """Requests that had a slot of a worker while one of these choices had."""
    own = [
        stay
        for track in snapshot.tracks
        for stay in stays_of(track.transitions, track.end_ns or snapshot.now_ns)
    ]
    held = {worker_id: _merged(own, worker_id) for worker_id in {stay.worker_id for stay in own}}
    return tuple(
        dict.fromkeys(
            other.id
            for other in snapshot.others
            if any(
                _overlap(held.get(stay.worker_id, ()), stay)
                for stay in stays_of(other.transitions, other.end_ns)
            )
        )
    )


def _merged(stays: Iterable[Stay], worker_id: str) -> list[Stay]:
    """When any of these was at this worker, in order, none of them in another."""
    merged: list[Stay] = []
    for stay in sorted(stay for stay in stays if stay.worker_id == worker_id):
        if merged and stay.start_ns <= merged[-1].end_ns:
            end_ns = max(stay.end_ns, merged[-1].end_ns)
            merged[-1] = merged[-1]._replace(end_ns=end_ns)
        else:
            merged.append(stay)
    return merged


def _overlap(held: Sequence[Stay], stay: Stay) -> bool:
    """With any of them, for more than a moment."""
    before = bisect_left(held, stay.end_ns, key=_start_ns)
    return before > 0 and held[before - 1].end_ns > stay.start_ns


def _timeline(snapshot: Snapshot, track: Track, mates: tuple[str, ...]) -> Timeline:
    last_ns = track.transitions[-1].at_ns
    end_ns = track.end_ns if track.ended else max(snapshot.now_ns, last_ns)
    intervals: list[Interval] = []
    for one, after in pairwise([*track.transitions, Transition(end_ns, Phase.UNKNOWN)]):
        if after.at_ns > one.at_ns:
            intervals += _Stay(snapshot, track, one, after).intervals()
    if track.committed_ns > end_ns:
        intervals.append(_committing(end_ns, track.committed_ns))
    return Timeline(
        id=track.id,
        sequence_id=track.sequence_id,
        choice=track.choice,
        ended=track.ended,
        num_preemptions=track.num_preemptions,
        intervals=tuple(intervals),
        num_mates=len(mates),
        mates=mates[:MATES_TOLD_MAX],
    )


def _committing(start_ns: int, end_ns: int) -> Interval:
    return Interval(start_ns=start_ns, end_ns=end_ns, phase=Phase.COMMIT, why=UNACKNOWLEDGED)


class _Stay:
    """From one transition of a choice to the next."""

    def __init__(
        self, snapshot: Snapshot, track: Track, one: Transition, after: Transition
    ) -> None:
        self._snapshot, self._track = snapshot, track
        self._one, self._after = one, after
        self._steps = snapshot.steps.get(one.worker_id, [])

    def intervals(self) -> Iterator[Interval]:
        one, after, snapshot = self._one, self._after, self._snapshot
        start_ns, end_ns = one.at_ns, after.at_ns
        if one.phase is Phase.QUEUE and one.why != ON_ITS_WAY:
            windows = [snapshot.store, snapshot.closed, snapshot.throttled]
            for piece in _split(start_ns, end_ns, windows):
                yield from [_waiting(piece)] if piece.why else self._queued(piece)
        elif one.phase is Phase.PREFILL:
            windows = [snapshot.store, snapshot.late.get(one.worker_id, [])]
            for piece in _split(start_ns, self._last_answer_ns(), windows):
                yield self._stalled(piece) if piece.why else self._prefilling(piece)
            yield from self._unanswered(self._last_answer_ns())
        elif one.phase is Phase.DECODE:
            windows = [snapshot.store, snapshot.silent]
            for piece in _split(start_ns, self._last_answer_ns(), windows):
                yield from [self._stalled(piece)] if piece.why else self._decoding(piece)
            yield from self._unanswered(self._last_answer_ns())
        else:
            yield Interval(start_ns=start_ns, end_ns=end_ns, phase=one.phase, why=one.why)

    # In the queue

    def _queued(self, piece: Window) -> Iterator[Interval]:
        """Where no look at the queue named it others stood before it, and this is why they did."""
        if self._one.why:
            yield _waiting(piece._replace(why=self._one.why))
            return
        looks, start_ns, end_ns = self._snapshot.looks, piece.start_ns, piece.end_ns
        first = bisect_right(looks, start_ns, key=_at_ns)
        before = looks[first - 1] if first else None
        last = bisect_left(looks, end_ns, lo=first, key=_at_ns)
        for look in [*looks[first:last], Look(end_ns, "", None)]:
            if look.at_ns > start_ns:
                why = before.why if before and before.why else BEHIND
                behind = before.head if before else None
                yield _waiting(Window(start_ns, look.at_ns, why), behind)
            start_ns, before = look.at_ns, look

    # On a worker

    def _last_answer_ns(self) -> int:
        """Of a stay that a worker's or a leader's loss ended, or that goes on: when the worker was
        last heard of, if that is long ago; else its end.
        """
        start_ns, end_ns = self._one.at_ns, self._after.at_ns
        is_open = not self._track.ended and self._after.phase is Phase.UNKNOWN
        if not is_open and self._after.why not in (WORKER_LOST, LEADER_LOST):
            return end_ns
        last = bisect_right(self._steps, end_ns, key=_answered_ns)
        heard_ns = max(start_ns, self._steps[last - 1].answered_ns if last else 0)
        return heard_ns if end_ns - heard_ns >= self._stall_ns() else end_ns

    def _unanswered(self, heard_ns: int) -> Iterator[Interval]:
        if (end_ns := self._after.at_ns) > heard_ns:
            windows = [self._snapshot.store]
            for piece in _split(heard_ns, end_ns, windows):
                yield self._stalled(piece._replace(why=piece.why or self._after.why or NO_ANSWER))

    def _prefilling(self, piece: Window) -> Interval:
        one, steps = self._one, self._between(piece)
        start_ns, end_ns = piece.start_ns, piece.end_ns
        is_first, is_last = start_ns == one.at_ns, end_ns >= self._last_answer_ns()
        own = [chunk for since_ns, *chunk in self._track.chunks if since_ns == one.at_ns]
        return Interval(
            start_ns=start_ns,
            end_ns=end_ns,
            phase=Phase.PREFILL,
            why=one.why,
            worker_id=one.worker_id,
            num_cached_tokens=one.num_cached_tokens if is_first else 0,
            blocks=one.blocks if is_first else NO_JOIN,
            chunks=tuple(n for at, n in own if start_ns <= at and (at < end_ns or is_last)),
            batch_mates=_mates(steps),
        )

    def _decoding(self, piece: Window) -> Iterator[Interval]:
        """Between long gaps, and those."""
        gaps, start_ns = [*pairwise(self._own(self._between(piece)))], piece.start_ns
        longest_ns = self._stall_ns(gaps)
        stalls = [gap for gap in gaps if _length(gap) >= longest_ns]
        for gap in sorted(nlargest(STALLS_MAX, stalls, key=_length)):
            if gap[0].answered_ns > start_ns:
                yield self._decoded(Window(start_ns, gap[0].answered_ns, ""))
            yield self._gap(*gap)
            start_ns = gap[1].answered_ns
        if start_ns < piece.end_ns:
            yield self._decoded(piece._replace(start_ns=start_ns))

    def _decoded(self, piece: Window) -> Interval:
        steps = self._between(piece)
        gaps = [(b.answered_ns - a.answered_ns, b) for a, b in pairwise(self._own(steps))]
        return Interval(
            start_ns=piece.start_ns,
            end_ns=piece.end_ns,
            phase=Phase.DECODE,
            why=self._one.why,
            worker_id=self._one.worker_id,
            num_steps=_num_after(piece.start_ns, self._own(steps)),
            gap_p50_ns=round(median(gap_ns for gap_ns, _ in gaps)) if gaps else 0,
            longest=tuple(
                Gap(step.answered_ns, gap_ns, step.rows, step.prompt_tokens)
                for gap_ns, step in nlargest(GAPS_SHOWN, gaps)
            ),
            batch_mates=_mates(steps),
        )

    def _gap(self, before: Step, step: Step) -> Interval:
        """A stall that a step ended: by whose doing."""
        start_ns, end_ns = before.answered_ns, step.answered_ns
        late = self._snapshot.late.get(self._one.worker_id, [])
        between = [s for s in self._between(Window(start_ns, end_ns, "")) if s is not before]
        is_long = step.step_us * 2000 >= end_ns - start_ns
        whose = None
        if any(w.start_ns < end_ns and w.end_ns > start_ns for w in late):
            why = Why.LATE.value
        elif len(between) > 1:
            why, whose = SAT_OUT, between[0].largest
        elif step.prompt_tokens and (is_long or not step.step_us):
            why, whose = ANOTHER_PROMPT, step.largest
        else:
            why = LONG_STEP if is_long else NO_STEP
        return self._stalled(Window(start_ns, end_ns, why), whose)

    def _stalled(self, piece: Window, by: SequenceId | None = None) -> Interval:
        steps = self._between(piece)
        newest = steps[-1:] if by is not None else []
        # While its prompt is computed the steps are those of others.
        own = self._own(steps) if self._one.phase is Phase.DECODE else []
        return Interval(
            start_ns=piece.start_ns,
            end_ns=piece.end_ns,
            phase=Phase.STALL,
            why=piece.why,
            worker_id=self._one.worker_id,
            num_steps=_num_after(piece.start_ns, own),
            longest=tuple(
                Gap(s.answered_ns, piece.end_ns - piece.start_ns, s.rows, s.prompt_tokens)
                for s in newest
            ),
            batch_mates=_mates(steps),
            stalled_by=by,
        )

    def _between(self, piece: Window) -> list[Step]:
        first = bisect_left(self._steps, piece.start_ns, key=_answered_ns)
        return self._steps[first : bisect_right(self._steps, piece.end_ns, key=_answered_ns)]

    def _own(self, steps: Sequence[Step]) -> list[Step]:
        """Without those in which it sat out."""
        worker_id = self._one.worker_id
        sat_out = {plan_id for of, plan_id in self._track.sat_out if of == worker_id}
        return [step for step in steps if step.plan_id not in sat_out]

    def _stall_ns(self, gaps: Sequence[tuple[Step, Step]] = ()) -> int:
        """How long a gap must be to stand apart: by those of this choice, or of those before."""
        last = bisect_right(self._steps, self._one.at_ns, key=_answered_ns)
        before = [*pairwise(self._steps[max(0, last - STEPS_BEFORE) : last])]
        medians = [median(map(_length, some)) for some in (gaps, before) if len(some) > 1]
        return max(STALL_NS_MIN, round(STALL_TIMES * min(medians, default=0)))


def _waiting(piece: Window, behind: SequenceId | None = None) -> Interval:
    return Interval(
        start_ns=piece.start_ns,
        end_ns=piece.end_ns,
        phase=Phase.QUEUE,
        why=piece.why,
        behind=behind,
    )


def _split(start_ns: int, end_ns: int, windows: Sequence[Sequence[Window]]) -> Iterator[Window]:
    """All of the time, with the reason of the window that a part of it is in; empty: of none. Of
    several windows the first that is named.
    """
    edges = {start_ns, end_ns}
    for some in windows:
        first = bisect_right(some, start_ns, key=_end_ns)
        for window in some[first : bisect_left(some, end_ns, key=_start_ns)]:
            edges |= {max(start_ns, window.start_ns), min(end_ns, window.end_ns)}
    pieces: list[Window] = []
    for since_ns, until_ns in pairwise(sorted(edges)):
        found = (_at(some, since_ns) for some in windows)
        why = next((window.why for window in found if window is not None), "")
        if pieces and pieces[-1].why == why:
            pieces[-1] = pieces[-1]._replace(end_ns=until_ns)
        else:
            pieces.append(Window(since_ns, until_ns, why))
    yield from pieces


def _at(windows: Sequence[Window], at_ns: int) -> Window | None:
    index = bisect_right(windows, at_ns, key=_start_ns) - 1
    return windows[index] if index >= 0 and windows[index].end_ns > at_ns else None


def _mates(steps: Sequence[Step]) -> int:
    # Where only chunks were computed no row had a token, its own neither.
    return max((step.rows - 1 for step in steps if step.rows), default=0)


def _num_after(start_ns: int, steps: Sequence[Step]) -> int:
    """The step at which an interval begins is the one before's."""
    return sum(step.answered_ns > start_ns for step in steps)


def _length(gap: tuple[Step, Step]) -> int:
    return gap[1].answered_ns - gap[0].answered_ns


_at_ns = attrgetter("at_ns")
_answered_ns = attrgetter("answered_ns")
_start_ns, _end_ns = attrgetter("start_ns"), attrgetter("end_ns")
