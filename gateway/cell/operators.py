"""What only operators may see: the live core of the cell, and the archives of its schedulers.

Gateways decide nothing. They know where the schedulers are, the leader from its lease and who
stands by from what it says of its cell, ask them, and hand on what these say. Those who watch alike
share one watch of the leader's: it looks, tells and is read once, however many they are.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final

import grpc

from gateway.cell.archives import CHANNEL_OPTIONS, Archive, merged
from gateway.cell.leader import LeaderClient, Search
from gateway.cell.ledger_session import LedgerLink
from kaiten.v1.archive_pb2 import ArchiveEntry, ArchiveGap
from kaiten.v1.scheduler_service_pb2 import ReadArchiveRequest, RehearseRequest, RehearseResponse
from kaiten.v1.watch_pb2 import WatchRequest, WatchResponse
from service_kit.clock import Clock
from service_kit.errors import InvalidRequest, NotFound, Overloaded, Unavailable
from service_kit.grpc_health import AtMost
from service_kit.peers import Peers

SERVICE: Final = "kaiten.v1.SchedulerService"
STREAMS_MAX: Final = 16
REHEARSE_S: Final = 20.0
# Responses that whoever shares a watch may be behind; then a snapshot is next.
BEHIND_MAX: Final = 32


def _refusal(request: RehearseRequest, error: grpc.aio.AioRpcError) -> Exception:
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return NotFound(f"worker {request.worker_id!r}")
        case grpc.StatusCode.INVALID_ARGUMENT:
            field, _, rule = (error.details() or "").partition(": ")
            return InvalidRequest(field, rule)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return Overloaded("the leader is busy with another rehearsal", 1.0)
    return Unavailable(f"the leader: {error.details()}")


class Told:
    """What a leader said once to all who share a watch."""

    __slots__ = ("data", "event", "said", "steps", "view")

    def __init__(self, data: bytes, before: Counter[str] | None = None) -> None:
        self.said = said = WatchResponse.FromString(data)
        self.data = data
        # What the HTTP door makes of it, once it has.
        self.event = b""
        # No two looks have the same, so two who were told of one are told the same from then on.
        self.view = said.epoch, said.seq, said.committed_seq, said.unix_ns
        # Iterations since the watch began, by worker.
        self.steps = Counter(before)
        for each in said.steps:
            self.steps[each.worker_id] += each.num_skipped + len(each.steps)

    def after(self, missed: Counter[str]) -> "Told":
        """The same to somebody who missed so many iterations before it."""
        if not missed:
            return self
        said = WatchResponse()
        said.CopyFrom(self.said)
        for worker_id, count in missed.items():
            said.steps.add(worker_id=worker_id, num_skipped=count)
        return Told(said.SerializeToString())


class SharedWatch:
    """A watch of whoever leads, for all who read it: responses are numbered from 0, and the newest
    so many are kept. It goes on at the leader's pace, whoever reads slowly.
    """

    def __init__(self, responses: AsyncGenerator[bytes, None]) -> None:
        self.readers = 0
        self.count = 0
        self._kept: deque[Told] = deque(maxlen=BEHIND_MAX)
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._read(responses))
        self._reading.add_done_callback(lambda _: self._news.set())

    @property
    def is_over(self) -> bool:
        return self._reading.done()

    @property
    def steps(self) -> Counter[str]:
        """Iterations since it began, by worker."""
        return self._kept[-1].steps if self._kept else Counter()

    def told_of(self, view: tuple[int, ...]) -> tuple[int, Told] | None:
        """The response that told of this view, if it is kept, and the number of the next."""
        for back, told in enumerate(reversed(self._kept)):
            if told.view == view:
                return self.count - back, told
        return None

    def keeps(self, number: int) -> bool:
        return number >= self.count - len(self._kept)

    async def response(self, number: int) -> Told:
        """One that is kept, or the next. Raises what ended the watch."""
        while number >= self.count and not self.is_over:
            await self._news.wait()
        if number < self.count:
            return self._kept[number - self.count]
        await self._reading
        raise Unavailable("the watch is over")

    async def close(self) -> None:
        """Nobody reads it any more."""
        self._reading.cancel()
        await asyncio.wait({self._reading})
        if not self._reading.cancelled():
            # Whoever read it has raised it.
            self._reading.exception()

    async def _read(self, responses: AsyncGenerator[bytes, None]) -> None:
        async with aclosing(responses):
            async for data in responses:
                self._kept.append(Told(data, self.steps))
                self.count += 1
                self._news.set()
                self._news = asyncio.Event()


class Operators:
    """One per gateway, for both doors, which have asked who calls."""

    def __init__(self, link: LedgerLink, clock: Clock, peers: Peers | None = None) -> None:
        self._link, self._peers = link, peers or Peers()
        self._leader = LeaderClient(link, clock, self._peers)
        self._streams = AtMost(STREAMS_MAX, "operators' streams")
        # By what was asked for, the oldest first.
        self._shared: dict[bytes, list[SharedWatch]] = {}

    async def watch(self, request: WatchRequest) -> AsyncGenerator[Told, None]:
        """Of one leader after the other, each beginning with a snapshot.

        Everybody begins with a watch of their own, and leaves it for an older one as soon as both
        have told of the same view.
        """
        with self._streams:
            watch, number, told, missed = self._begin(request), 0, None, Counter[str]()
            try:
                while True:
                    if told is not None and not watch.keeps(number):
                        slow, watch, number = watch, self._begin(request), 0
                        try:
                            await watch.response(0)
                        finally:
                            missed = slow.steps - told.steps
                            await self._leave(request, slow)
                    told = await watch.response(number)
                    yield told.after(missed)
                    missed, number = Counter(), number + 1
                    if (older := self._older(request, watch, told)) is not None:
                        left, (watch, number, told) = watch, older
                        await self._leave(request, left)
            finally:
                await self._leave(request, watch)

    async def read_archive(
        self, request: ReadArchiveRequest
    ) -> AsyncGenerator[Sequence[ArchiveEntry], None]:
        """Of whichever schedulers led, in order. Who does not answer is a gap at the end."""
        with self._streams:
            schedulers = await self._schedulers()
            archives = [Archive(address, request, self._peers) for address in schedulers]
            async with aclosing(merged([archive.parts() for archive in archives])) as parts:
                async for part in parts:
                    yield part.entries
            if not any(archive.is_kept for archive in archives):
                raise NotFound("an archive of this cell's schedulers (--archive-dir)")
            if gaps := [archive.problem for archive in archives if archive.problem]:
                yield [ArchiveEntry(gap=ArchiveGap(reason=reason)) for reason in gaps]

    async def rehearse(self, request: RehearseRequest) -> RehearseResponse:
        """By whoever leads now. NotFound: it has no such worker; InvalidRequest says its reason."""
        try:
            response: RehearseResponse = await self._leader.ask(
                lambda scheduler: scheduler.Rehearse, request, REHEARSE_S
            )
        except grpc.aio.AioRpcError as error:
            raise _refusal(request, error) from None
        return response

    async def _schedulers(self) -> list[str]:
        """The leader, or who led last, and those who stood by then."""
        record, lease = await self._link.cell()
        if lease is None:
            raise Unavailable("no scheduler has led this cell yet")
        standbys = record.standby_addresses if record is not None else ()
        return [address for address in dict.fromkeys([lease.address, *standbys]) if address]

    def _begin(self, request: WatchRequest) -> SharedWatch:
        watch = SharedWatch(self._watched(request))
        watch.readers = 1
        self._shared.setdefault(request.SerializeToString(), []).append(watch)
        return watch

    def _older(
        self, request: WatchRequest, watch: SharedWatch, told: Told
    ) -> tuple[SharedWatch, int, Told] | None:
        """A watch to go on with, joined, from which response on, and what it told before that."""
        for older in self._shared[request.SerializeToString()]:
            if older is watch:
                return None
            if not older.is_over and (found := older.told_of(told.view)) is not None:
                older.readers += 1
                return older, *found
        return None

    async def _leave(self, request: WatchRequest, watch: SharedWatch) -> None:
        watch.readers -= 1
        if not watch.readers:
            asked = request.SerializeToString()
            self._shared[asked].remove(watch)
            if not self._shared[asked]:
                del self._shared[asked]
            await watch.close()

    async def _watched(self, request: WatchRequest) -> AsyncGenerator[bytes, None]:
        """Of one leader after the other, each beginning with a snapshot."""
        search = self._leader.search()
        async with aclosing(search.addresses()) as addresses:
            async for address in addresses:
                async with aclosing(self._watch(address, request, search)) as responses:
                    async for response in responses:
                        yield response
                        search.heard()

    async def _watch(
        self, address: str, request: WatchRequest, search: Search
    ) -> AsyncGenerator[bytes, None]:
        """For as long as this scheduler leads, unparsed. Nothing, when it does not."""
        proof = self._peers.proof()
        async with self._peers.channel(address, CHANNEL_OPTIONS) as channel:
            method = channel.unary_stream(
                f"/{SERVICE}/Watch", request_serializer=WatchRequest.SerializeToString
            )
            try:
                async for response in proof.stream(method(request, metadata=proof.metadata)):
                    yield response
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise Overloaded("the leader has as many watchers as it takes", 1.0) from None
                search.missed(address, error)
