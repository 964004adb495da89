"""Timelines as messages."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, cast

from kaiten.v1.timeline_pb2 import ChoiceTimeline, TimelineGap, TimelineInterval, TimelinePhase
from scheduler_svc.core.types import SequenceId
from scheduler_svc.timeline_intervals import Interval, Timeline
from scheduler_svc.timeline_track import Phase

PHASE_TO_PROTO: Final = {
    phase: cast("TimelinePhase", TimelinePhase.Value(f"TIMELINE_PHASE_{phase.name}"))
    for phase in Phase
}
PHASE_FROM_PROTO: Final = {number: phase for phase, number in PHASE_TO_PROTO.items()}


def timeline_to_proto(
    timeline: Timeline, names: Mapping[SequenceId, str] = MappingProxyType({})
) -> ChoiceTimeline:
    """All of it: what is for operators only, a gateway leaves out. `names`: the requests of those
    who are `mentioned`.
    """
    return ChoiceTimeline(
        choice=timeline.choice,
        sequence_id=timeline.sequence_id,
        ended=timeline.ended,
        num_preemptions=timeline.num_preemptions,
        intervals=[_interval(interval, names) for interval in timeline.intervals],
        num_batch_mates=timeline.num_mates,
        batch_mate_ids=timeline.mates,
    )


def _interval(interval: Interval, names: Mapping[SequenceId, str]) -> TimelineInterval:
    return TimelineInterval(
        phase=PHASE_TO_PROTO[interval.phase],
        start_unix_ns=interval.start_ns,
        end_unix_ns=interval.end_ns,
        why=interval.why,
        behind_sequence_id=interval.behind,
        worker_id=interval.worker_id,
        num_cached_tokens=interval.num_cached_tokens,
        chunk_tokens=interval.chunks,
        num_steps=interval.num_steps,
        gap_p50_ns=interval.gap_p50_ns,
        longest_gaps=[
            TimelineGap(
                end_unix_ns=gap.ended_ns,
                gap_ns=gap.gap_ns,
                rows=gap.rows,
                prompt_tokens=gap.prompt_tokens,
            )
            for gap in interval.longest
        ],
        batch_mates=interval.batch_mates,
        num_blocks=interval.blocks.given,
        num_shared_blocks=interval.blocks.shared,
        num_swapped_in_blocks=interval.blocks.swapped_in,
        stalled_by_sequence_id=interval.stalled_by,
        behind_id=names.get(interval.behind or 0),
        stalled_by_id=names.get(interval.stalled_by or 0),
    )
