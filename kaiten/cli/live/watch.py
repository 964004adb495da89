"""`kaiten watch`: the live core of a cell, at a terminal."""

import math
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, cycle
from typing import Any, Final

import grpc
from google.protobuf.json_format import MessageToJson

from kaiten.cli.complaint import RESUME_S, complain
from kaiten.cli.live.cell_view import full_name_of, name_of, state_of
from kaiten.cli.live.reasons import reason, states_of, trouble, why_behind
from kaiten.client.connection import OPTIONS, with_key
from kaiten.client.errors import ApiError, CertificateError, from_rpc_error
from kaiten.client.live_core import NO_BLOCK, LiveCore, LiveSequence
from kaiten.tls import TLS
from kaiten.tls import channel as channel_to
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.watch_pb2 import (
    PassedOver,
    SequenceState,
    WatchedWorker,
    WatchRequest,
    WatchResponse,
)

# Who does not lead, or not any more, or is not there: somebody else may lead, or soon will.
ELSEWHERE: Final = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAVAILABLE)
RETRY_S: Final = 0.2
CLEAR: Final = "\x1b[H\x1b[2J"


def watch(
    gateways: Sequence[tuple[str, TLS | None]],
    *,
    api_key: str | None,
    interval_ms: int,
    once: bool,
    with_blocks: bool,
    as_json: bool,
) -> int:
    """Print every response, or what it makes of those before; the exit code."""
    core, before = LiveCore(), CLEAR if sys.stdout.isatty() and not once else ""
    try:
        for response in Watching(gateways, api_key, interval_ms, takes_rows=not as_json):
            if as_json:
                text = MessageToJson(response, indent=None, preserving_proto_field_name=True)
            else:
                core.take(response)
                lines = [*lines_of(core, with_blocks=with_blocks)]
                if before:
                    lines = fitting(lines, *shutil.get_terminal_size())
                text = before + "\n".join(lines)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            if once:
                break
    except ApiError as error:
        return complain(error, ", ".join(address for address, _ in gateways))
    return 0


class Watching:
    """Responses for ever, of whichever of these leads or knows who does. ApiError: none for a
    while; after the first, for `resume_s`. `close` ends them, from another thread, too.
    """

    def __init__(
        self,
        gateways: Sequence[tuple[str, TLS | None]],
        api_key: str | None,
        interval_ms: int,
        *,
        takes_rows: bool = True,
        resume_s: float = RESUME_S,
    ) -> None:
        self._gateways, self._resume_s = gateways, resume_s
        self._metadata = with_key((), api_key)
        self._request = WatchRequest(interval_ms=interval_ms, takes_rows=takes_rows)
        self._call: Any = None
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()

    def __iter__(self) -> Iterator[WatchResponse]:
        failures, since_s, for_s = 0, time.monotonic(), RESUME_S
        for address, tls in cycle(self._gateways):
            try:
                for response in self._of(address, tls):
                    failures, since_s, for_s = 0, math.inf, self._resume_s
                    yield response
            except grpc.RpcError as error:
                if self._is_closed:
                    return
                known = from_rpc_error(error)
                is_elsewhere = error.code() in ELSEWHERE and not isinstance(known, CertificateError)
                # gRPC may have taken a minute to see that one is gone: the others are asked, too.
                failures, since_s = failures + 1, min(since_s, now_s := time.monotonic())
                is_over = failures >= len(self._gateways) and now_s - since_s > for_s
                if not is_elsewhere or is_over:
                    raise known from None
            # Nobody tells when another leads: ask again.
            time.sleep(RETRY_S)

    def _of(self, address: str, tls: TLS | None) -> Iterator[WatchResponse]:
        with channel_to(address, tls or False, OPTIONS) as channel:
            stub = SchedulerServiceStub(channel)
            self._call = stub.Watch(self._request, metadata=self._metadata)
            # By another thread, while it was made.
            if self._is_closed:
                self._call.cancel()
            yield from self._call


def fitting(lines: Sequence[str], columns: int, rows: int) -> list[str]:
    """As many as a screen has room for, and how many it has not: a long queue would push the cell
    and its workers out of sight, which come first.
    """
    ends = [*accumulate(-(-len(line) // columns) for line in lines)]
    # The cursor stands below the last one.
    if ends[-1] < rows:
        return [*lines]
    shown = sum(end < rows - 1 for end in ends)
    return [*lines[:shown], f"and {len(lines) - shown} more lines"]


def lines_of(core: LiveCore, *, with_blocks: bool = False) -> Iterator[str]:
    """The whole cell: who runs by worker and slot, then who waits in order."""
    running = sorted(core.sequences.items(), key=lambda item: (item[1].place.slot, item[0]))
    yield (
        f"epoch {core.epoch}  record {core.seq} ({core.seq - core.committed_seq} uncommitted)  "
        f"{core.configured.policy}  {core.waiting} waiting"
        + (f"  {why}" if (why := trouble(core)) else "")
    )
    for worker in core.workers.values():
        theirs = [one for _, one in running if one.place.worker_id == worker.worker_id]
        yield _worker(core, worker, theirs)
        for one in theirs:
            yield f"  {_name(one)}  {_counts(one)}" + (f"  {_blocks(one)}" if with_blocks else "")
    for position, sequence_id in enumerate(core.queue, start=1):
        one = core.sequences[sequence_id]
        why = _why(core, one.passed_over) or f"  {why_behind(core, one, position)}"
        yield f"waiting {position}  {_name(one)}  {_counts(one)}{why}"
    for one in core.sequences.values():
        if one.place.state == SequenceState.SEQUENCE_STATE_FORKING:
            yield f"{_name(one)}  {_counts(one)}"
    if len(core.queue) < core.waiting:
        yield f"and {core.waiting - len(core.queue)} more"


def _worker(core: LiveCore, worker: WatchedWorker, theirs: Sequence[LiveSequence]) -> str:
    plans = ", ".join(
        f"{plan.plan_id} ({plan.steps_answered} of {plan.lease_steps} steps)"
        for plan in worker.plans
    )
    host = (
        f", {worker.host_blocks_used} of {worker.host_block_count} in host memory used"
        if worker.host_block_count
        else ""
    )
    running = sum(one.place.state == SequenceState.SEQUENCE_STATE_RUNNING for one in theirs)
    return (
        f"worker {full_name_of(core, worker.worker_id)}  {running} of {worker.slots_max} slots  "
        f"{worker.blocks_free} of {worker.block_count} blocks free{host}  plans {plans or 'none'}"
        + "".join(f"  {state}" for state in states_of(worker))
    )


def _name(one: LiveSequence) -> str:
    """Where it is, and whose choice it is."""
    is_running = one.place.state == SequenceState.SEQUENCE_STATE_RUNNING
    where = f"slot {one.place.slot}" if is_running else state_of(one)
    return f"{where}  {one.identity.id}/{one.identity.choice}"


def _counts(one: LiveSequence) -> str:
    counts = one.counts
    return (
        f"computed {counts.num_computed_tokens}, scheduled {counts.num_scheduled_tokens}, "
        f"tokens {counts.num_tokens} of {one.identity.tokens_max}"
    )


def _blocks(one: LiveSequence) -> str:
    """By layer group, runs of blocks that follow each other; who has no blocks has no groups."""
    return "  ".join(f"[{' '.join(_runs(table))}]" for table in one.tables or [[]])


def _runs(table: Iterable[int]) -> Iterator[str]:
    first = last = NO_BLOCK
    for block in [*table, NO_BLOCK]:
        if last != NO_BLOCK and block == last + 1:
            last = block
            continue
        if first != NO_BLOCK:
            yield f"{first}-{last}" if last > first else f"{first}"
        first = last = block


def _why(core: LiveCore, passed_over: Iterable[PassedOver]) -> str:
    """By worker, as far as it is one worker's reason."""
    said = []
    for over in passed_over:
        is_here = over.worker_id in core.workers
        said.append(f"  {name_of(core, over.worker_id)}: " if is_here else "  ")
        said.append(reason(over))
    return "".join(said)
