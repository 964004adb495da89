"""Keeps the worker known to the leading scheduler: register, heartbeat, and say goodbye.

Any failure (nobody there, a standby, a scheduler that restarted) leads back to registering, with
backoff, at the leader's address when the answer names it and otherwise at the next one configured.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import grpc
import structlog

from gpu_worker.batch.plans import Description
from gpu_worker.service import wire
from kaiten.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc
from service_kit.addresses import problem_of
from service_kit.grpc_errors import metadata_of
from service_kit.peers import Peers

log = structlog.get_logger()

# An answer takes a millisecond. A leader silent for this long may be frozen and have a successor.
_RPC_S_MAX: Final = 1.0
# Small, because it is part of every fail-over: a new leader has nothing to run on until we find it.
_BACKOFF_S_MIN: Final = 0.025
_BACKOFF_S_MAX: Final = 0.5
# More than reach the longest wait. Without a bound the 1024th failure in a row overflows a float.
_DOUBLINGS_MAX: Final = 8
# While draining, how often to ask whether everything was moved elsewhere.
_DRAIN_POLL_S: Final = 0.1
# A scheduler that does not answer this often while we drain has nothing to move.
_DRAIN_FAILURES_MAX: Final = 3
# One name may stand for several schedulers (replicas of a container). Whichever is asked first
# names the leader if it is not; another order at each attempt, so that a silent one is passed by.
_CHANNEL_OPTIONS: Final = (
    (
        "grpc.service_config",
        '{"loadBalancingConfig": [{"pick_first": {"shuffleAddressList": true}}]}',
    ),
)


_REFUSALS: Final = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED)


class Registrar:
    def __init__(
        self,
        schedulers: Sequence[str],
        *,
        address_for: Callable[[str], Awaitable[str]],
        description: Description,
        peers: Peers | None = None,
    ) -> None:
        """`address_for(scheduler)` is where that scheduler reaches this worker."""
        self._peers = peers or Peers()
        self._schedulers = tuple(schedulers)
        self._address_for = address_for
        self._description = description
        self._leader_hint = ""
        self._attempt = 0
        # By scheduler, of this row of failures.
        self._noted: dict[str, tuple[grpc.StatusCode, str]] = {}
        self._is_registered = False
        self._was_registered = False
        self._is_draining = asyncio.Event()
        self._is_drained = asyncio.Event()
        self._is_asked = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Registrar {','.join(self._schedulers)} registered={self._is_registered}>"

    @property
    def is_registered(self) -> bool:
        return self._is_registered

    async def drain(self) -> None:
        """Ask the scheduler to move everything elsewhere; returns when it says that it has.

        A worker that lost its registration a moment ago may still have work: it asks again too.
        """
        self._is_draining.set()
        self.ask_now()
        if not self._was_registered:
            return
        await self._is_drained.wait()

    def ask_now(self) -> None:
        """The leader's stream ended: it may have a successor, who has nothing to run on."""
        self._is_asked.set()

    async def run(self) -> None:
        """Until cancelled."""
        failures = 0
        while True:
            scheduler = self._next_scheduler()
            try:
                address = await self._address_for(scheduler)
                async with self._peers.channel(scheduler, _CHANNEL_OPTIONS) as channel:
                    stub = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
                    await self._attend(stub, address)
                failures = 0
            except grpc.aio.AioRpcError as error:
                failures = 1 if self._is_registered else failures + 1
                self._note(scheduler, error, failures)
            doubled_s = _BACKOFF_S_MIN * 2 ** min(failures, _DOUBLINGS_MAX)
            await asyncio.sleep(min(doubled_s, _BACKOFF_S_MAX))

    def _next_scheduler(self) -> str:
        """The leader if somebody named it (tried once), else the configured ones in turn."""
        hint, self._leader_hint = self._leader_hint, ""
        if hint:
            return hint
        self._attempt += 1
        return self._schedulers[(self._attempt - 1) % len(self._schedulers)]

    async def _attend(
        self, stub: scheduler_service_pb2_grpc.SchedulerServiceStub, address: str
    ) -> None:
        """Register, then heartbeat until told to register again."""
        worker = wire.description_to_proto(self._description)
        request = scheduler_service_pb2.RegisterRequest(address=address, worker=worker)
        registered = await self._peers.ask(stub.Register, request, _RPC_S_MAX)
        self._is_registered = self._was_registered = True
        log.info("worker.registered", address=address, interval_ms=registered.heartbeat_interval_ms)
        interval_s = max(registered.heartbeat_interval_ms, 1) / 1000
        while True:
            await self._pause(interval_s)
            # As it was asked: the drain may begin before the answer is here.
            is_draining = self._is_draining.is_set()
            beat = scheduler_service_pb2.HeartbeatRequest(
                boot_id=self._description.boot_id, is_draining=is_draining
            )
            answer = await self._peers.ask(stub.Heartbeat, beat, _RPC_S_MAX)
            # A scheduler that does not know the worker has nothing left on it.
            if is_draining and (answer.is_drained or answer.must_register):
                self._is_drained.set()
            if answer.must_register:
                return

    async def _pause(self, interval_s: float) -> None:
        """An interval, cut short when there is a reason to ask; quick polls while draining."""
        if self._is_draining.is_set():
            interval_s = min(interval_s, _DRAIN_POLL_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await self._is_asked.wait()
        self._is_asked.clear()

    def _note(self, scheduler: str, error: grpc.aio.AioRpcError, failures: int) -> None:
        self._is_registered = False
        hint = metadata_of(error).get("leader_address", "")
        self._leader_hint = "" if problem_of(hint) else hint
        if self._is_draining.is_set() and failures >= _DRAIN_FAILURES_MAX:
            self._is_drained.set()
        # Say it when it changes, not at every attempt. A refusal's words say more than its code.
        code = error.code()
        is_refusal = code in _REFUSALS
        noted = (code, (error.details() or "") if is_refusal else "")
        if failures <= 1:
            self._noted.clear()
        if noted != self._noted.get(scheduler):
            self._noted[scheduler] = noted
            log.warning(
                "worker.unregistered",
                scheduler=scheduler,
                code=code.name,
                reason=error.details(),
                leader=self._leader_hint,
            )
