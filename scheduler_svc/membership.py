"""Who may work for a cell, and what a worker may say anew of itself. Pure."""

from collections.abc import Iterable, Iterator
from typing import Final

from protos.kaiten.v1.common_pb2 import Capabilities, WorkerDescription
from service_kit.errors import OutOfOrder

# Of one process; all else it keeps for as long as it lives.
CHANGEABLE: Final = {"step_tokens_max", "mixed_tokens_max", "capabilities.features"}


def refuse_stranger(
    worker: WorkerDescription,
    others: Iterable[WorkerDescription],
    live_count: int,
    weights_digest: str,
) -> None:
    """OutOfOrder for a worker that serves something else than the cell.

    Neither beside other workers, nor for what was accepted when others were here: `live_count`
    requests, for weights of that digest.
    """
    for other in others:
        if other.fingerprint != worker.fingerprint:
            raise OutOfOrder(
                f"fingerprint {worker.fingerprint[:12]} of {worker.model!r} differs from "
                f"{other.fingerprint[:12]} of {other.model!r}: the workers of a cell need the same "
                "weights, config, dtype and KV dtype"
            )
    told = worker.weights_digest
    if told and live_count and weights_digest not in ("", told):
        raise OutOfOrder(
            f"{live_count} live sequences were accepted for other weights ({weights_digest[:12]}) "
            f"than those of {worker.model!r} ({told[:12]}): let workers of the former model end "
            "them, cancel them, or give this one another --cell"
        )


def refuse_change(known: WorkerDescription, told: WorkerDescription) -> None:
    """OutOfOrder for a worker that describes itself otherwise than it may within one process."""
    for name, was, now in _differences(known, told):
        if name not in CHANGEABLE:
            raise OutOfOrder(
                f"worker.{name} was {was} and is {now}: it stays for as long as a worker's process "
                "lives, restart it"
            )


def _differences(
    known: WorkerDescription | Capabilities, told: WorkerDescription | Capabilities
) -> Iterator[tuple[str, object, object]]:
    for name in known.DESCRIPTOR.fields_by_name:
        was, now = getattr(known, name), getattr(told, name)
        if name == "capabilities":
            for field, before, after in _differences(was, now):
                yield f"capabilities.{field}", before, after
        elif was != now:
            yield name, was, now
