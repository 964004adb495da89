"""Where a request's time went: the leader knows, whoever is asked, and else the archives do."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import grpc

from gateway.cell.leader import LeaderClient
from gateway.cell.ledger_session import LedgerLink
from gateway.cell.replays import Caller, Replays
from gateway.children.tenant_slots import TenantSlots
from kaiten.v1.scheduler_service_pb2 import ReadTimelineRequest, ReadTimelineResponse
from kaiten.v1.timeline_pb2 import ChoiceTimeline
from service_kit.clock import Clock
from service_kit.errors import Overloaded, Unavailable
from service_kit.peers import Peers

CALL_S: Final = 5.0
# Requests that the leader is asked for at once, of all tenants, who share them.
AT_ONCE: Final = 4
# Of an interval, for operators.
OF_OTHERS: Final = (
    "behind_sequence_id",
    "behind_id",
    "stalled_by_sequence_id",
    "stalled_by_id",
    "worker_id",
)


class Explained(NamedTuple):
    """A request by its id in the ledger: its time by choice, and its span as its record has it;
    None: that is not known.
    """

    id: str
    choices: Sequence[ChoiceTimeline]
    traceparent: str | None


class Explainer:
    """One per gateway."""

    def __init__(self, link: LedgerLink, clock: Clock, peers: Peers) -> None:
        self._leader = LeaderClient(link, clock, peers)
        self._replays = Replays(self._leader, clock)
        self._asked = TenantSlots(AT_ONCE)

    async def timelines(self, ledger_ids: Sequence[str], caller: Caller) -> Explained:
        """Of the first of these requests that somebody knows. NotFound: nobody does; Unavailable:
        nobody leads; Overloaded: as many are replayed already as may be.
        """
        try:
            found = await self._of_leader(ledger_ids, caller)
            if found is None:
                found = await self._of_archives(ledger_ids, caller)
            else:
                await self._replays.fill(found.id, found.choices, caller)
        except Unavailable as error:
            if caller.is_operator:
                raise
            # Where schedulers are is no tenant's business.
            raise Unavailable("no scheduler tells of it now") from error
        if not caller.is_operator:
            for choice in found.choices:
                scrub(choice)
        return found

    async def _of_leader(self, ledger_ids: Sequence[str], caller: Caller) -> Explained | None:
        async with self._asked.place(caller.tenant):
            for id in ledger_ids:
                if (found := await self._ask(id)) is not None:
                    return found
        return None

    async def _ask(self, ledger_id: str) -> Explained | None:
        """None: the leader does not know it."""
        request = ReadTimelineRequest(id=ledger_id)
        try:
            response: ReadTimelineResponse = await self._leader.ask(
                lambda scheduler: scheduler.ReadTimeline, request, CALL_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Overloaded("the leader explains as many as it can", 1.0) from None
            raise Unavailable(f"the leader: {error.details()}") from None
        is_told = response.HasField("traceparent")
        return Explained(ledger_id, response.choices, response.traceparent if is_told else None)

    async def _of_archives(self, ledger_ids: Sequence[str], caller: Caller) -> Explained:
        """As it is, an id of an answer is hardly ever a request's own: that comes last."""
        told = await self._replays.find(ledger_ids[::-1], caller)
        return Explained(told.id, told.choices, told.traceparent)


def scrub(choice: ChoiceTimeline) -> None:
    """Leave it without whose worker it was, who stood before it and who beside it."""
    choice.ClearField("batch_mate_ids")
    for interval in choice.intervals:
        for field in OF_OTHERS:
            interval.ClearField(field)
