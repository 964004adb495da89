"""A sequence: one choice of a request while it lives. Mutable, owned by the scheduler, never leaves
the core.

There are no phases. A sequence knows tokens and has KV for some of them; every step closes the gap.

    tokens   [ prompt ............ | output ...... ]
    done     [ KV answered ..)                          0 <= done
    planned  [ KV answered or certain in flight ..)     done <= planned < known
    known    [ tokens known once that is answered ...)  len(tokens) <= known

"""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

from scheduler_svc.core.blocks import chain_hash, root_hash
from scheduler_svc.core.types import BlockId, Finished, Request, Serial, SlotIndex

if TYPE_CHECKING:
    from scheduler_svc.core.waiting import Tenant
    from scheduler_svc.core.worker import Worker


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


MOVES: Final = {
    State.WAITING: {State.RUNNING, State.FINISHED},
    State.RUNNING: {State.PREEMPTED, State.FINISHED},
    State.PREEMPTED: {State.RUNNING, State.FINISHED},
    State.FINISHED: set[State](),
}


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """One choice being computed. Equal only to itself."""

    life: "Life"
    choice: int
    serial: Serial
    tokens: list[int]
    prompt_tokens: int
    # KV places of the longest it can become: the last token's KV is never needed.
    places_max: int
    state: State = State.WAITING
    stay: "Stay | None" = None
    blocks: list[BlockId] = field(default_factory=list)
    done: int = 0
    planned: int = 0
    known: int = 0
    # Hashes of full blocks from the front, as far as computed; the first `remembered` are in the
    # pool.
    hashes: list[bytes] = field(default_factory=list)
    layout: tuple[str, int] | None = None
    remembered: int = 0
    preemptions: int = 0
    deaths: int = 0

    def __repr__(self) -> str:
        return f"<{self.serial} {self.state.value} {self.done}/{len(self.tokens)}>"

    @property
    def worker(self) -> "Worker | None":
        """Where it is in a batch, or on its way out of one."""
        return self.stay.worker if self.stay is not None else None

    @property
    def output_tokens(self) -> int:
        """Tokens committed beyond the prompt."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def is_certain_to_finish(self) -> bool:
        """The steps in flight bring its last token, whatever they sample."""
        return self.known > self.places_max

    @property
    def is_suspect(self) -> bool:
        """Workers died under it again and again without a token in between."""
        return self.deaths >= self.life.deaths_max

    @property
    def skippable(self) -> int:
        """Tokens that a prefix hit may spare: the last one brings the logits of the next.

        A position of the prompt that is still to be explained needs those of the one before it.
        """
        life = self.life
        return (len(self.tokens) if life.is_explained else life.explained) - 1

    def to_explain(self, count: int) -> range:
        """Prompt positions whose logits come with the next `count` tokens, as far as wanted.

        Those of a token are about the position after it.
        """
        end = min(self.done + count, self.prompt_tokens - 1) + 1
        return range(max(self.done + 1, self.life.explained), end)

    @property
    def tokens_max(self) -> int:
        """Prompt and output at their longest: what a running sequence counts against its tenant's
        bound.
        """
        return self.places_max + 1

    def move(self, state: State) -> None:
        """The only way a state changes."""
        assert state in MOVES[self.state], f"{self.serial}: {self.state} may not become {state}"
        self.state = state

    def full_hashes(self, count: int, layout: tuple[str, int]) -> list[bytes]:
        """Hashes of the first `count` blocks of tokens, all full; computed once.

        `layout` is the worker's fingerprint and block size: another makes other hashes.
        """
        if self.layout != layout:
            self.layout, self.hashes = layout, []
        fingerprint, block_size = layout
        root = root_hash(fingerprint, self.life.request.tenant) if not self.hashes else b""
        while len(self.hashes) < count:
            start = len(self.hashes) * block_size
            parent = self.hashes[-1] if self.hashes else root
            self.hashes.append(chain_hash(parent, self.tokens[start : start + block_size]))
        return self.hashes[:count]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Stay:
    """One visit of a sequence to a worker. Plans remember stays, not sequences.

    A sequence may leave and come back, even to the same slot: what was computed for the earlier
    stay never happened.
    """

    sequence: Sequence
    worker: "Worker"
    slot: SlotIndex


@dataclass(eq=False, slots=True, kw_only=True)
class Life:
    """A request while it lives: its sequences, its endings, its times (ledger clock, ns)."""

    request: Request
    tenant: "Tenant"
    deaths_max: int
    # Positions of the prompt before this one are explained, or were not asked for. Only the first
    # choice explains; the others wait for its first token, and by then it is done.
    explained: int
    sequences: list[Sequence] = field(default_factory=list)
    # Choices other than the first wait here for its prompt, and fork from it.
    siblings: list[Sequence] = field(default_factory=list)
    endings: dict[int, Finished] = field(default_factory=dict)
    # Until when it waits for a worker that can hold it; None: one is there, or none ever was.
    misfit_ns: int | None = None
    cached_tokens: int = 0
    admitted_ns: int | None = None
    first_token_ns: int | None = None

    @property
    def is_explained(self) -> bool:
        """Nobody waits for log-probabilities of the prompt."""
        return self.explained >= len(self.request.prompt)
