"""Who may work for a cell, what a worker may say of itself, and what it may say anew. Pure."""

from collections.abc import Iterable, Iterator
from typing import Final

from kaiten.v1.common_pb2 import Capabilities, WorkerDescription
from kaiten.v1.scheduler_service_pb2 import RegisterRequest
from scheduler_svc.wire import PLAN_VERSION
from service_kit.addresses import problem_of
from service_kit.errors import InvalidRequest, OutOfOrder

UINT32_MAX: Final = (1 << 32) - 1
TEXT_CHARS_MAX: Final = 1024
# Every sequence has KV places for so many in reserve.
SLOT_TOKENS_MAX: Final = 256
FEATURES_MAX: Final = 64
# What the core takes for granted of a worker: with nothing to divide by or to seat it would end,
# and it keeps books of every block and every slot.
RANGES: Final = {
    "block_size": (1, 1 << 16),
    "block_count": (1, 1 << 22),
    "slots_max": (1, 1 << 14),
    "vocab_size": (1, UINT32_MAX),
    # A prompt token and an output token.
    "context_tokens_max": (2, UINT32_MAX),
}
# Every sequence has a block table for each.
LAYER_GROUPS_MAX: Final = 64
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


def refuse_namesake(boot_id: str, address: str, another: str) -> None:
    """OutOfOrder: whoever knows a worker's boot id could otherwise take its place.

    A worker that really moved is silent at its old address, and taken at its new one when it is
    forgotten there.
    """
    raise OutOfOrder(
        f"worker {boot_id} is at {address}, and cannot be at {another} too; if it has moved, it is"
        " taken when it has been silent for --worker-timeout-ms"
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


def check_registration(request: RegisterRequest) -> None:
    """InvalidRequest for what no worker can be, whoever leads."""
    if not request.address or not request.worker.boot_id:
        raise InvalidRequest("address, worker.boot_id", "must not be empty")
    if rule := problem_of(request.address):
        raise InvalidRequest("address", f"{rule}, got {request.address[:64]!r}")
    _check_texts(request)
    _check_ranges(request.worker)
    _check_budgets(request.worker)
    _check_capabilities(request.worker.capabilities)


def _check_texts(request: RegisterRequest) -> None:
    """InvalidRequest for the first text that is too long: every renewal carries them."""
    texts = {"address": request.address}
    for field, value in request.worker.ListFields():
        if isinstance(value, str):
            texts[f"worker.{field.name}"] = value
    for name, text in texts.items():
        if len(text) > TEXT_CHARS_MAX:
            rule = f"must have at most {TEXT_CHARS_MAX} characters, got {len(text)}"
            raise InvalidRequest(name, rule)


def _check_ranges(worker: WorkerDescription) -> None:
    """InvalidRequest for the first figure that no worker can have."""
    for field, (least, most) in RANGES.items():
        if not least <= (value := getattr(worker, field)) <= most:
            raise InvalidRequest(f"worker.{field}", f"must be in [{least}, {most}], got {value}")
    if (count := len(worker.capabilities.layer_groups)) > LAYER_GROUPS_MAX:
        rule = f"must be at most {LAYER_GROUPS_MAX}, got {count}"
        raise InvalidRequest("worker.capabilities.layer_groups", rule)


def _check_budgets(worker: WorkerDescription) -> None:
    """InvalidRequest unless every kind of step has room for a prompt beside the rows."""
    most = worker.capabilities.slot_tokens_max or 1
    if most > SLOT_TOKENS_MAX:
        rule = f"must be at most {SLOT_TOKENS_MAX}, got {most}"
        raise InvalidRequest("worker.capabilities.slot_tokens_max", rule)
    rows, of = worker.slots_max * most, "slots_max" if most == 1 else f"{most} times slots_max"
    if worker.step_tokens_max <= rows:
        rule = f"must be more than {of}, got {worker.step_tokens_max}"
        raise InvalidRequest("worker.step_tokens_max", rule)
    mixed = worker.mixed_tokens_max
    if mixed and not rows < mixed <= worker.step_tokens_max:
        rule = f"must be 0, or more than {of} and at most step_tokens_max, got {mixed}"
        raise InvalidRequest("worker.mixed_tokens_max", rule)


def _check_capabilities(told: Capabilities) -> None:
    """InvalidRequest for a worker that does not read the plans that are written here."""
    if (count := len(told.features)) > FEATURES_MAX:
        rule = f"must have at most {FEATURES_MAX}, got {count}"
        raise InvalidRequest("worker.capabilities.features", rule)
    if (version := told.plan_version) < PLAN_VERSION:
        rule = (
            f"must be at least {PLAN_VERSION}, got {version}: this scheduler writes plans that the "
            "worker does not read; update the worker first"
        )
        raise InvalidRequest("worker.capabilities.plan_version", rule)
