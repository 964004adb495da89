"""Where a request's time went: the leader knows, whoever is asked."""

from typing import Final

import grpc
import structlog

from gateway.cell.ledger_session import LedgerLink
from kaiten.v1.scheduler_service_pb2 import ReadTimelineRequest, ReadTimelineResponse
from kaiten.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from kaiten.v1.timeline_pb2 import ChoiceTimeline
from service_kit.clock import Clock
from service_kit.errors import NotFound, Overloaded, Unavailable
from service_kit.grpc_health import AtMost
from service_kit.peers import Peers

log = structlog.get_logger()

RETRY_S: Final = 0.2
CALL_S: Final = 5.0
# Requests that are explained at once, of all tenants: each is a call of the leader.
AT_ONCE: Final = 4
# A leader's change takes less.
LEADERLESS_S_MAX: Final = 10.0
# Of an interval, for operators.
OF_OTHERS: Final = (
    "behind_sequence_id",
    "behind_id",
    "stalled_by_sequence_id",
    "stalled_by_id",
    "worker_id",
)
# Who does not lead (any more), or is not there: another does, or will soon.
ELSEWHERE: Final = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)


class Explainer:
    """One per gateway."""

    def __init__(self, link: LedgerLink, clock: Clock, peers: Peers) -> None:
        self._link, self._clock, self._peers = link, clock, peers
        self._asked = AtMost(AT_ONCE, "requests that are explained")

    async def timelines(self, ledger_id: str, *, is_operator: bool) -> list[ChoiceTimeline]:
        """By choice. NotFound: the leader does not know the request; Unavailable: nobody leads;
        Overloaded: so many are asked for already.
        """
        with self._asked:
            found = await self._of_leader(ledger_id)
        return found if is_operator else [scrubbed(each) for each in found]

    async def _of_leader(self, ledger_id: str) -> list[ChoiceTimeline]:
        give_up_ns = self._clock.monotonic_ns() + LEADERLESS_S_MAX * 1e9
        while True:
            lease = (await self._link.cell()).lease
            found = await self._ask(lease.address, ledger_id) if lease and lease.nonce else None
            if found is not None:
                return found
            if self._clock.monotonic_ns() > give_up_ns:
                raise Unavailable("no scheduler leads")
            await self._clock.sleep(RETRY_S)

    async def _ask(self, address: str, ledger_id: str) -> list[ChoiceTimeline] | None:
        """None: another leads, or nobody."""
        async with self._peers.channel(address) as channel:
            read = SchedulerServiceStub(channel).ReadTimeline
            request = ReadTimelineRequest(id=ledger_id)
            try:
                response: ReadTimelineResponse = await self._peers.ask(read, request, CALL_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    name = ledger_id.partition(":")[2]
                    raise NotFound(f"request {name!r} (live, or ended of late)") from None
                if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise Overloaded("the leader explains as many as it can", 1.0) from None
                if error.code() not in ELSEWHERE:
                    raise Unavailable(f"the scheduler at {address}: {error.details()}") from None
                log.info("explain.interrupted", address=address, reason=error.details())
                return None
        return list(response.choices)


def scrubbed(choice: ChoiceTimeline) -> ChoiceTimeline:
    """Without whose worker it was, who stood before it and who beside it."""
    choice.ClearField("batch_mate_ids")
    for interval in choice.intervals:
        for field in OF_OTHERS:
            interval.ClearField(field)
    return choice
