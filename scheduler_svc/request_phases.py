"""The phases of a request that is over, as its trace has them. Pure.

Of its choices the one that ended last says where the time went. What it did before it was preempted
is apart from what it did afterwards; reasons of waiting that follow each other are one phase.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from opentelemetry.util.types import AttributeValue

from scheduler_svc.core.outcome import RequestOver
from scheduler_svc.timeline_track import Phase, Track, Transition

# Of one request; of more the oldest are left out. A preemption makes three.
PHASES_MAX: Final = 64
# Reasons, and chunks of a prompt, that a phase names.
NAMED_MAX: Final = 32


class PhaseSpan(NamedTuple):
    """One phase, and what is to be told of it alone."""

    phase: Phase
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]


def phases_of(over: RequestOver, tracks: Sequence[Track], ended_ns: int) -> list[PhaseSpan]:
    """Each begins where the one before ends. Of whom no track is kept there are sums alone."""
    if not tracks:
        return [*_sums(over, ended_ns)]
    return [*_phases(max(tracks, key=lambda track: track.end_ns))][-PHASES_MAX:]


def _sums(over: RequestOver, ended_ns: int) -> Iterator[PhaseSpan]:
    start_ns = ended_ns - over.queue_ns - over.prefill_ns - over.decode_ns
    for phase, took_ns in (
        (Phase.QUEUE, over.queue_ns),
        (Phase.PREFILL, over.prefill_ns),
        (Phase.DECODE, over.decode_ns),
    ):
        yield PhaseSpan(phase, start_ns, start_ns + took_ns, {})
        start_ns += took_ns


def _phases(track: Track) -> Iterator[PhaseSpan]:
    stays = pairwise([*track.transitions, Transition(track.end_ns, Phase.UNKNOWN)])
    for phase, group in groupby(stays, key=lambda stay: stay[0].phase):
        some = [*group]
        first, end_ns = some[0][0], some[-1][1].at_ns
        yield PhaseSpan(phase, first.at_ns, end_ns, _told(track, first, [one for one, _ in some]))


def _told(track: Track, first: Transition, some: Sequence[Transition]) -> dict[str, AttributeValue]:
    told: dict[str, AttributeValue] = {}
    if whys := [*dict.fromkeys(one.why for one in some if one.why)]:
        told["kaiten.why"] = whys[:NAMED_MAX]
    if first.worker_id:
        told["kaiten.worker.id"] = first.worker_id
    if first.phase is Phase.PREFILL:
        chunks = [count for since_ns, _, count in track.chunks if since_ns == first.at_ns]
        told["kaiten.chunks"] = chunks[:NAMED_MAX]
        told["kaiten.tokens.cached"] = first.num_cached_tokens
        told["kaiten.blocks.allocated"] = first.blocks.given
        told["kaiten.blocks.shared"] = first.blocks.shared
        told["kaiten.blocks.swapped_in"] = first.blocks.swapped_in
    return told
