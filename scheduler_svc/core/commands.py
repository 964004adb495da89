"""What the core can be told: every change of its state is one of these values, applied.

The journal writes them down, a replay reads them back, simulation and tests make them up.
"""

from dataclasses import dataclass, field

from scheduler_svc.core.types import (
    Config,
    Handover,
    Reason,
    Request,
    Rules,
    SequenceId,
    StepResult,
    WorkerSpec,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """Decide by this from now on: the policy of that name, but for the rules that are named.

    ValueError, with nothing changed, for what there is not and for what contradicts itself.
    """

    config: Config
    policy: str
    rules: Rules = field(default_factory=Rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Take a request in. An id seen before changes nothing."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """End a request, or one choice of it, wherever it is. Unknown or ended: nothing happens."""

    # The request's: that of its first choice.
    sequence_id: SequenceId
    # None: every choice.
    choice: int | None = None
    reason: Reason = Reason.CANCELLED
    # Cuts the output to a length that somebody downstream found to be the end (a stop string).
    num_output_tokens: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """Go on from what an earlier core had learned of the requests submitted so far."""

    handover: Handover


@dataclass(frozen=True, slots=True, kw_only=True)
class Expire:
    """End every request whose deadline, or whose wait for a worker, has passed; and who cannot have
    a first token before its deadline any more.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJoined:
    """A worker with an empty batch.

    Requests that fit none of the workers now known wait for one that they fit, if not for long.
    """

    worker_id: str
    spec: WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChanged:
    """What it can do in a step has changed; slots, blocks and model have not.

    Sequences that it can serve no more go on elsewhere, or wait for a worker that can.
    """

    worker_id: str
    spec: WorkerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDraining:
    """Give it nothing new."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLate:
    """Its step is overdue: it is given nothing, and has no share, until it answers."""

    worker_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreBehind:
    """So many records are not acknowledged that nothing more may be planned, or no longer."""

    is_behind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """Its batch is gone. Sequences go on elsewhere from their committed tokens."""

    worker_id: str
    # Whether it died of them, or refused them. None: only its connection is known to be broken; it
    # joins again, or a second WorkerLost, of a worker that is no more, is the verdict.
    is_crash: bool | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """Book one step. ResultRejected, with nothing changed, when it contradicts its plan."""

    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class MakePlan:
    """What this worker does next, if it needs a new plan."""

    worker_id: str


Command = (
    Configured
    | Submit
    | Cancel
    | HandedOver
    | Expire
    | WorkerJoined
    | WorkerChanged
    | WorkerDraining
    | WorkerLate
    | StoreBehind
    | WorkerLost
    | StepDone
    | MakePlan
)
