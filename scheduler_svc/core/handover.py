"""What a core has learned by deciding, for the core that decides after it.

Requests and their tokens are in the ledger. Who was preempted how often, under whom workers died
and how much each tenant was served is not: without it a request that kills workers would have them
all again with every leader.
"""

from heapq import nlargest, nsmallest

from scheduler_svc.core.cell import CellState
from scheduler_svc.core.requests import Sequence, State
from scheduler_svc.core.types import Handover, SequencePast

SEQUENCES_MAX = 1024
TENANTS_MAX = 256


def handover_of(cell: CellState) -> Handover:
    """Costs what was ever preempted and still lives, not what waits."""
    told = [s for s in cell.preempted.values() if s.num_preemptions or s.deaths]
    worst = nsmallest(SEQUENCES_MAX, told, key=lambda s: (-s.deaths, s.sequence_id))
    ahead = nlargest(TENANTS_MAX, cell.waiting.ahead(), key=lambda told: (told[1], told[0]))
    return Handover(sequences=tuple(map(_past, worst)), tenants=tuple(ahead))


def take_over(cell: CellState, handover: Handover) -> None:
    """Of requests that live; of a tenant without any, when it comes back."""
    live = {s.sequence_id: s for live in cell.live.values() for s in live.sequences}
    for past in handover.sequences:
        sequence = live.get(past.sequence_id)
        if sequence is not None and sequence.state is not State.FINISHED:
            cell.preempted[past.sequence_id] = sequence
            sequence.num_preemptions = past.num_preemptions
            # More than are allowed by now would be a verdict that nobody gives.
            sequence.deaths = min(past.deaths, sequence.live.deaths_max)
            sequence.furthest = past.furthest
    for name, tokens in handover.tenants:
        cell.waiting.put_ahead(name, tokens)


def _past(sequence: Sequence) -> SequencePast:
    return SequencePast(
        sequence_id=sequence.sequence_id,
        num_preemptions=sequence.num_preemptions,
        deaths=sequence.deaths,
        furthest=sequence.furthest,
    )
