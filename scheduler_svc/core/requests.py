"""Requests while they live: a tenant's queue, a request, and its sequences. Mutable, owned by the
core, never seen outside.

A sequence is one choice of a request. It has no phases: it has tokens, and KV for some of them, and
every step closes the gap.

    tokens                [ prompt ............ | output ...... ]
    num_computed_tokens   [ KV answered ..)                        >= 0
    num_scheduled_tokens  [ KV answered or certain in flight ..)   >= num_computed_tokens
    num_tokens            [ tokens once that is answered ......)   > num_scheduled_tokens

docs/core.md draws how the three move with two plans in flight. What is kept is how far each is from
the number of known tokens: that is the same before and after a step in which everybody decodes.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from scheduler_svc.core.kv import BlockTable
from scheduler_svc.core.outcome import Finished
from scheduler_svc.core.types import Request, SequenceId, SlotIndex


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

    live: "LiveRequest"
    choice: int
    sequence_id: SequenceId
    tokens: list[int]
    num_prompt_tokens: int
    # Prompt and output at their longest: what it counts against its tenant's bound while it runs.
    tokens_max: int
    kv: BlockTable
    # It gives way to all that are not.
    is_flex: bool = False
    state: State = State.WAITING
    residency: "Residency | None" = None
    # Of the known tokens; tokens beyond them that are certain to come; and of both together, those
    # that are not scheduled: 1 while it decodes.
    num_uncomputed_tokens: int = 0
    num_tokens_ahead: int = 0
    gap: int = 0
    num_preemptions: int = 0
    # So many computed tokens bring more to book than a token; 0 until a residency's first answer.
    milestone: int = 0
    # Tokens that were ever computed of it on workers that it has left.
    furthest: int = 0
    # Since then: workers that died under it, and those lost of which nobody knows yet whether.
    deaths: int = 0
    unjudged: set[str] = field(default_factory=set)
    # Its place in the queue, as of when it began to wait.
    queue_key: "Key" = ()

    def __repr__(self) -> str:
        computed = f"{self.num_computed_tokens}/{len(self.tokens)}"
        return f"<{self.sequence_id} {self.state.value} {computed}>"

    @property
    def num_output_tokens(self) -> int:
        """Tokens committed beyond the prompt."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV has been answered."""
        return len(self.tokens) - self.num_uncomputed_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens once what is certain is answered."""
        return len(self.tokens) + self.num_tokens_ahead

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens whose KV is answered or certain in flight."""
        return self.num_tokens - self.gap

    @property
    def is_suspect(self) -> bool:
        """Workers died under it, or may have, again and again, and it never got any further."""
        return self.deaths + len(self.unjudged) >= self.live.deaths_max

    @property
    def is_awaiting_verdict(self) -> bool:
        """Enough to convict it, were all of them known to have died."""
        return self.deaths + len(self.unjudged) > self.live.deaths_max

    @property
    def is_convicted(self) -> bool:
        """More workers died under it than an accident explains."""
        return self.state is not State.FINISHED and self.deaths > self.live.deaths_max

    @property
    def max_cached_tokens(self) -> int:
        """Tokens that a prefix hit may spare: the last one brings the logits of the next.

        A position whose prompt logprob is still to come needs those of the one before it.
        """
        live = self.live
        return (len(self.tokens) if live.has_prompt_logprobs else live.prompt_logprobs_done) - 1

    def prompt_logprobs_of(self, count: int) -> range:
        """Prompt positions whose logits come with the next `count` tokens, as far as wanted.

        Those of a token are about the position after it.
        """
        end = min(self.num_computed_tokens + count, self.num_prompt_tokens - 1) + 1
        return range(max(self.num_computed_tokens + 1, self.live.prompt_logprobs_done), end)

    def pass_milestone(self) -> None:
        """Further than ever clears its record; then the next milestone is its table's."""
        self.milestone = self.kv.commit_at
        if self.deaths or self.unjudged:
            if self.num_computed_tokens > self.furthest:
                self.deaths = 0
                self.unjudged.clear()
            else:
                self.milestone = min(self.milestone, self.furthest + 1)

    def move(self, state: State) -> None:
        """The only way a state changes."""
        assert state in MOVES[self.state], (
            f"{self.sequence_id}: {self.state} may not become {state}"
        )
        self.state = state


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Residency:
    """One visit of a sequence to a worker. Plans remember residencies, not sequences.

    A sequence may leave and come back, even to the same slot: what was computed for the earlier
    visit never happened.
    """

    sequence: Sequence
    worker_id: str
    slot: SlotIndex


@dataclass(eq=False, slots=True, kw_only=True)
class LiveRequest:
    """A request while it lives: its sequences, its endings, its times (ledger clock, ns)."""

    request: Request
    tenant: "Tenant"
    deaths_max: int
    # Log-probabilities of prompt positions before this one are out, or were not asked for. Only the
    # first choice brings them; the others wait for its first token, and by then all are out.
    prompt_logprobs_done: int
    sequences: list[Sequence] = field(default_factory=list)
    # Choices other than the first wait here for its prompt, and fork from it.
    siblings: list[Sequence] = field(default_factory=list)
    endings: dict[int, Finished] = field(default_factory=dict)
    num_cached_tokens: int = 0
    admitted_ns: int | None = None
    first_token_ns: int | None = None

    @property
    def has_prompt_logprobs(self) -> bool:
        """Nobody waits for log-probabilities of the prompt."""
        return self.prompt_logprobs_done >= len(self.request.prompt)

    @property
    def is_led(self) -> bool:
        """The first choice will compute the prompt, so that the others can fork from it."""
        first = self.sequences[0]
        return first.state is State.WAITING and first.num_output_tokens == 0


@dataclass(eq=False, slots=True)
class Tenant:
    """One tenant with live requests."""

    name: str
    # Tokens; only ever compared with other tenants'.
    served: int
    # The bound that its newest request named, and the one that counts; None: no bound.
    tokens_max_asked: int | None = None
    tokens_max: int | None = None
    num_requests: int = 0
    num_running: int = 0
    # Of its running sequences, each at its longest.
    tokens_running: int = 0
    # Its part of what is served, where the policy's order is fair.
    weight: int = 1
    # Flex last, each by the policy's order, which is unique and taken when it begins to wait.
    queue: list[tuple["Key", Sequence]] = field(default_factory=list)
    # The same but for flex, sorted by arrival, where a longest wait is promised.
    arrivals: list["Arrival"] = field(default_factory=list)
    # Of those the first, when it may move.
    oldest: "Arrival | None" = None
    # The length of the queue, when it may move.
    num_admissible: int = 0
    # Its entry in the heap of the waiting queue; None: it is throttled, or nothing waits.
    head: "Head | None" = None

    @property
    def is_throttled(self) -> bool:
        """What waits first would exceed the bound. One sequence alone may always run."""
        return bool(self.queue) and self.would_exceed(self.queue[0][1])

    def would_exceed(self, sequence: Sequence) -> bool:
        """One more that runs would be beyond the bound."""
        if self.tokens_max is None or not self.num_running:
            return False
        return self.tokens_running + sequence.tokens_max > self.tokens_max


Key = tuple[int, ...]
# When its request arrived; ids are unique, so sequences are never compared.
Arrival = tuple[int, SequenceId, Sequence]
# Whether its first sequence is flex, and its share of service.
Rank = tuple[bool, int]
# What a tenant's head is compared by: its rank, then the order of its first sequence. No two are
# equal, so tenants are never compared.
Head = tuple[Rank, Key, Tenant]
