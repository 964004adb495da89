"""What timelines know at one moment and requests that come later may have to do with. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from scheduler_svc.core.types import SequenceId, SlotIndex
from scheduler_svc.timeline_track import STEPS_BEFORE, Look, Step, Track, Transition

# Choices; those that have a slot are told of besides.
SNAPSHOT_CHOICES_MAX: Final = 4096
# Of a worker.
SNAPSHOT_STEPS_MAX: Final = STEPS_BEFORE


# One that lives: its track, of which nothing is looked at here that changes; what it does by now;
# and how often it was preempted.
ChoiceSnapshot = tuple[Track, Transition, int]


class WorkerSnapshot(NamedTuple):
    """`block_size` 0: it is gone, and its steps are remembered."""

    block_size: int
    # Why it takes nobody; empty: it does. And since when a step of it is overdue; 0: none is.
    closed_why: str
    late_ns: int
    # What its newest look at the queue came to, as in `Look`.
    look: tuple[str, SequenceId | None] | None
    steps: tuple[Step, ...]
    # As of its newest plan; of plans on their way, prompt tokens and whose are the most.
    slots: Mapping[SlotIndex, SequenceId]
    prompt_tokens: Mapping[int, tuple[int, SequenceId | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSnapshot:
    """Shares nothing that changes. Times in ns on the ledger's clock."""

    now_ns: int
    # When the leadership's first command was; the leader before decided nothing from `lost_ns` on.
    since_ns: int
    lost_ns: int
    live: tuple[ChoiceSnapshot, ...]
    # Not all that live are told of.
    is_cut: bool
    workers: Mapping[str, WorkerSnapshot]
    look: Look | None
    # Since when it is so; 0: it is not.
    store_behind_ns: int
    closed_ns: int
    closed_why: str
    throttled_ns: Mapping[str, int]
