"""Where a request's time went: the leader knows, whoever is asked."""

from typing import Final, NamedTuple

import grpc

from gateway.cell.leader import LeaderClient
from kaiten.v1.scheduler_service_pb2 import ReadTimelineRequest, ReadTimelineResponse
from kaiten.v1.timeline_pb2 import ChoiceTimeline
from service_kit.errors import NotFound, Overloaded, Unavailable
from service_kit.grpc_health import AtMost

CALL_S: Final = 5.0
# Requests that are explained at once, of all tenants: each is a call of the leader.
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
    """A request's time by choice, and its span as its record has it; None: that is not known."""

    choices: list[ChoiceTimeline]
    traceparent: str | None


class Explainer:
    """One per gateway."""

    def __init__(self, leader: LeaderClient) -> None:
        self._leader = leader
        self._asked = AtMost(AT_ONCE, "requests that are explained")

    async def timelines(self, ledger_id: str, *, is_operator: bool) -> Explained:
        """NotFound: the leader does not know the request; Unavailable: nobody leads;
        Overloaded: so many are asked for already.
        """
        with self._asked:
            found = await self._of_leader(ledger_id)
        if not is_operator:
            for choice in found.choices:
                scrub(choice)
        return found

    async def _of_leader(self, ledger_id: str) -> Explained:
        request = ReadTimelineRequest(id=ledger_id)
        try:
            response: ReadTimelineResponse = await self._leader.ask(
                lambda scheduler: scheduler.ReadTimeline, request, CALL_S
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                name = ledger_id.partition(":")[2]
                raise NotFound(f"request {name!r} (live, or ended of late)") from None
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Overloaded("the leader explains as many as it can", 1.0) from None
            raise Unavailable(f"the leader: {error.details()}") from None
        is_told = response.HasField("traceparent")
        return Explained(list(response.choices), response.traceparent if is_told else None)


def scrub(choice: ChoiceTimeline) -> None:
    """Leave it without whose worker it was, who stood before it and who beside it."""
    choice.ClearField("batch_mate_ids")
    for interval in choice.intervals:
        for field in OF_OTHERS:
            interval.ClearField(field)
