"""Stand by: wait to lead, say who does, and take over at once when the leader has ended.

A standby holds a stream to the leader. Its silence says nothing: the lease's TTL is for that. When
the stream ends, the standby asks again:

    the same leader answers          only the connection broke
    nobody is there, or another      it has ended: its lease can be taken now
    it is there and says nothing     it may be put aside: the TTL decides

Being wrong costs a fail-over, never a token: whoever led is fenced.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from typing import Final

import grpc
import structlog

from kaiten.v1 import common_pb2
from kaiten.v1.scheduler_service_pb2 import StandByRequest
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from ledger import Candidate, Leader, Lease, Ledger
from scheduler_svc.servicer import Servicer
from service_kit.addresses import is_listening
from service_kit.clock import Clock
from service_kit.errors import Unavailable
from service_kit.outages import Outage
from service_kit.peers import Peers

log = structlog.get_logger()

# Who was there a moment ago and does not take a connection in this time is not there any more.
CONNECT_S_MAX: Final = 0.25
ANSWER_S_MAX: Final = 2.0
RETRY_S: Final = 0.1
# One channel per attempt: a broken connection must not be shared with the next one. No keepalive:
# it would make an end of silence.
CHANNEL_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)


class Found(Enum):
    """What became of a look at the leader."""

    LED = "it led until now"
    ABSENT = "it is not there"
    SILENT = "it is there, and says nothing"


class Standby:
    """One scheduler's time between two leaderships of its own."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        servicer: Servicer,
        *,
        ttl_s: float,
        address: str,
        above_epoch: int = 0,
        peers: Peers | None = None,
        on_store_problem: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`above_epoch`: some worker has seen a leader of this one. `on_store_problem` is told
        after every look why the store does not answer; empty: it does.
        """
        self._candidate = Candidate(
            ledger, clock, ttl_s, address=address, observer=self, above_epoch=above_epoch
        )
        self._clock, self._servicer, self._address = clock, servicer, address
        self._outage = Outage("store.waiting", over="store.answers")
        self._peers, self._on_store_problem = peers or Peers(), on_store_problem
        self._nonce = 0
        self._following: asyncio.Task[None] | None = None

    async def campaign(self) -> Leader:
        """Wait to lead. Raises StoreLost."""
        try:
            return await self._candidate.campaign()
        finally:
            await self._unfollow()

    def saw(self, lease: Lease | None) -> None:
        """Follow whoever leads now. A leader that has ended is nobody to send workers to."""
        self._on_store_problem("")
        self._outage.ended(self._clock.monotonic_ns())
        nonce = 0 if lease is None else lease.nonce
        if nonce == self._nonce:
            return
        self._nonce = nonce
        if self._following is not None:
            self._following.cancel()
        self._servicer.leader_address = ""
        if lease is not None and nonce:
            # Not to ourselves: the process that led here before us has ended.
            if lease.address != self._address:
                self._servicer.leader_address = lease.address
            self._following = asyncio.create_task(self._follow(lease), name="follow")

    def missed(self, error: Unavailable) -> None:
        self._on_store_problem(str(error))
        self._outage.failed(self._clock.monotonic_ns(), reason=str(error))

    async def _follow(self, lease: Lease) -> None:
        leader = common_pb2.Leader(epoch=lease.epoch, nonce=lease.nonce)
        was_there = False
        while True:
            found = await look_at(lease.address, leader, self._address, self._peers)
            if found is Found.ABSENT and was_there:
                break
            was_there = was_there or found is Found.LED
            if found is not Found.LED:
                await asyncio.sleep(RETRY_S)
        log.warning("leader.ended", epoch=lease.epoch, address=lease.address)
        self._servicer.leader_address = ""
        self._candidate.has_ended(lease.nonce)

    async def _unfollow(self) -> None:
        if self._following is not None:
            self._following.cancel()
            # Whatever it got wrong, the lease is ours now.
            await asyncio.wait({self._following})


async def look_at(
    address: str, leader: common_pb2.Leader, own_address: str = "", peers: Peers | None = None
) -> Found:
    """Hold a stream to this leader for as long as it lasts."""
    peers = peers or Peers()
    proof = peers.proof()
    if not await _is_listening(address):
        return Found.ABSENT
    async with peers.channel(address, CHANNEL_OPTIONS) as channel:
        request = StandByRequest(address=own_address)
        call = SchedulerServiceStub(channel).StandBy(request, metadata=proof.metadata)
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                first = await call.read()
                proof.check(await call.initial_metadata())
        except TimeoutError:
            return Found.SILENT
        except grpc.aio.AioRpcError as error:
            leads_no_more = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            return Found.ABSENT if leads_no_more else Found.SILENT
        if first is None:
            # Bytes that are no message: another version, or no scheduler at all.
            return Found.SILENT
        if first is grpc.aio.EOF or first.leader != leader:
            return Found.ABSENT
        log.info("leader.followed", epoch=leader.epoch, address=address)
        with suppress(grpc.aio.AioRpcError):
            await call.read()
        return Found.LED


async def _is_listening(address: str) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S_MAX):
            return await is_listening(address)
    except TimeoutError:
        return False
