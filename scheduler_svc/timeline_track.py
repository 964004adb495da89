"""What timelines are made of: what is written down of a choice, of workers and of looks. Pure."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Final, NamedTuple

from scheduler_svc.core.outcome import Join
from scheduler_svc.core.types import BlockId, SequenceId
from scheduler_svc.timeline_windows import Window

# Of one choice: of those between its arrival and the newest, the oldest are forgotten.
TRANSITIONS_MAX: Final = 512
# Of one choice: plans of workers in which it sat out.
SAT_OUT_MAX: Final = 512
# So many steps before a choice's own say what a gap of its worker is like.
STEPS_BEFORE: Final = 64


class Phase(Enum):
    """What a choice did."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    # It had begun and did not get on, or not nearly as fast as otherwise.
    STALL = "stall"
    # Ended, and the store had not acknowledged it yet.
    COMMIT = "commit"
    # Before this leader led, or too long ago: it is known only that the request was there.
    UNKNOWN = "unknown"


BEHIND: Final = "its turn has not come"
ON_ITS_WAY: Final = "on its way to the scheduler"
BEFORE: Final = "before this leader led"
TOO_LONG_AGO: Final = "too long ago to be told"
NOT_ARCHIVED: Final = "its archive has nothing of then"
WORKER_LOST: Final = "its worker was lost"
LEADER_LOST: Final = "its leader was lost"
NO_WORKER: Final = "no worker is here"
PREEMPTED: Final = "preempted"
NO_BLOCKS: Final = "too few blocks were free"
# Of the planner, those that look at the queue.
QUEUE_STAGES: Final = ("place", "admit")


class JoinBlocks(NamedTuple):
    """Of all layer groups: those that were given, of those such as hold what was computed, and of
    these such as are brought back from the worker's host memory.
    """

    given: int = 0
    shared: int = 0
    swapped_in: int = 0


NO_JOIN: Final = JoinBlocks()


def blocks_of(join: Join, block_size: int, swaps: Iterable[tuple[BlockId, BlockId]]) -> JoinBlocks:
    """What who joins is given, by the plan with these swaps. None of its blocks is a place in host
    memory: what is copied to one of them comes from there.
    """
    computed, targets = join.num_computed_tokens // block_size, {target for _, target in swaps}
    given = shared = swapped_in = 0
    for skipped, blocks in join.block_tables:
        given += len(blocks)
        shared += max(0, min(len(blocks), computed - skipped))
        if targets:
            swapped_in += sum(block in targets for block in blocks)
    return JoinBlocks(given, shared, swapped_in)


class Transition(NamedTuple):
    """From here on it is in this phase, for this reason."""

    at_ns: int
    phase: Phase
    why: str = ""
    worker_id: str = ""
    num_cached_tokens: int = 0
    blocks: JoinBlocks = NO_JOIN


class Stay(NamedTuple):
    """In the batch of a worker."""

    start_ns: int
    end_ns: int
    worker_id: str


class Look(NamedTuple):
    """Nobody behind `head` was looked at (None: nobody at all), and why; empty: everybody was."""

    at_ns: int
    why: str
    head: SequenceId | None


class Step(NamedTuple):
    """A step as it was answered. `step_us`: by the worker's own clock; `largest`: whose prompt
    tokens are the most in it.
    """

    answered_ns: int
    plan_id: int
    rows: int
    prompt_tokens: int = 0
    largest: SequenceId | None = None
    step_us: int = 0


@dataclass(eq=False, slots=True)
class Track:
    """What is written down of one choice; not its request, which has the prompt."""

    id: str
    tenant: str
    sequence_id: SequenceId
    choice: int
    transitions: list[Transition] = field(default_factory=list)
    # Since when it was prefilled then, when each was planned, and how many tokens; in order.
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    sat_out: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=SAT_OUT_MAX))
    num_preemptions: int = 0
    end_ns: int = 0
    ended: str = ""
    # 0: not yet, as far as is known.
    committed_ns: int = 0

    def enter(self, transition: Transition) -> None:
        """From its moment on; nothing, when that is what it does already."""
        if transition[1:] == self.transitions[-1][1:]:
            return
        if len(self.transitions) == TRANSITIONS_MAX:
            arrived_ns = self.transitions[0].at_ns
            self.transitions[:2] = [Transition(arrived_ns, Phase.UNKNOWN, TOO_LONG_AGO)]
            since_ns = self.transitions[1].at_ns
            self.chunks = [chunk for chunk in self.chunks if chunk[0] >= since_ns]
        self.transitions.append(transition)


def stays_of(transitions: Sequence[Transition], end_ns: int) -> list[Stay]:
    """When it had a slot, in order."""
    end = Transition(end_ns, Phase.UNKNOWN)
    return [
        Stay(one.at_ns, after.at_ns, one.worker_id)
        for one, after in pairwise([*transitions, end])
        if one.worker_id
    ]


class Other(NamedTuple):
    """Another choice, which may have had a slot meanwhile."""

    id: str
    transitions: Sequence[Transition]
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Of one request. It shares nothing that changes."""

    tracks: tuple[Track, ...]
    # By worker; and of the cell.
    steps: Mapping[str, list[Step]]
    looks: list[Look]
    # Nothing was planned for its sake; and nothing acknowledged of what was.
    store: list[Window]
    silent: list[Window]
    # Nobody could join any worker; by worker, a step was overdue; and its tenant was throttled.
    closed: list[Window]
    late: Mapping[str, list[Window]]
    throttled: list[Window]
    others: list[Other]
    now_ns: int
