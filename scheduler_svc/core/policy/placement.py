"""Placement: which worker. A worker asks, and a rule says how many sequences it may run."""

from typing import NamedTuple


class PlacementView(NamedTuple):
    """What a placement rule may look at."""

    # Sequences that run on the worker that asks, and on each other that could start the candidate.
    running: int
    others: tuple[int, ...]
    # Sequences that wait and may run, as far as their tenants' bounds go.
    num_admissible: int


def even_share(view: PlacementView) -> int:
    """Sequences per worker if everyone who waits and may run were spread evenly.

    No worker takes what another could start now; none waits for another that is full.
    """
    total = view.num_admissible + view.running + sum(view.others)
    return -(-total // (1 + len(view.others)))
