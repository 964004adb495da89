"""/v1/rehearsals: what the scheduler would decide for a burst under any policy, played."""

from typing import Annotated, Any, Final, Literal

from msgspec import Struct
from pydantic import Field

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import READS, Api, Operation
from gateway.openai.operators.access import check_operator
from gateway.openai.operators.watch import LiveSteps, configured_of, steps_of
from gateway.openai.request_body import FAIL_FAST, RequestBody
from kaiten.v1.scheduler_service_pb2 import RehearsedRequest, RehearseRequest

TOKENS_MAX: Final = 16_384
REQUESTS_MAX: Final = 256
Tokens = Annotated[int, Field(ge=1, le=TOKENS_MAX)]


class RehearsedBody(RequestBody):
    """One request of the burst."""

    arrived_ms: Annotated[float, Field(ge=0, le=3_600_000)] = 0.0
    """Since the first."""
    prompt_tokens: Tokens
    output_tokens: Tokens


class RehearsalBody(RequestBody):
    """POST /v1/rehearsals: a burst that is played, not served."""

    worker_id: str
    """Whose slots, blocks, budgets and step times; as `/v1/watch` has it."""
    policy: str = ""
    """fair, fcfs, priority or static; left out: what is decided by now."""
    between_ms: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Between two steps, beyond what they take."""
    requests: Annotated[
        list[RehearsedBody], Field(min_length=1, max_length=REQUESTS_MAX), FAIL_FAST
    ]
    """In the order in which they arrive, of 16,384 tokens in all."""

    def asked(self) -> RehearseRequest:
        return RehearseRequest(
            worker_id=self.worker_id,
            policy=self.policy,
            between_us=round(1000 * self.between_ms),
            requests=[
                RehearsedRequest(
                    arrived_us=round(1000 * each.arrived_ms),
                    num_prompt_tokens=each.prompt_tokens,
                    num_output_tokens=each.output_tokens,
                )
                for each in self.requests
            ],
        )


class Rehearsal(Struct, kw_only=True):
    """Times are since the first request arrived; ids are the places of the requests, from 1."""

    object: Literal["rehearsal"] = "rehearsal"
    configured: dict[str, Any]
    steps: LiveSteps


async def rehearse(api: Api, exchange: HttpExchange, body: RehearsalBody) -> None:
    """Nothing is computed, and nothing of the cell changes."""
    told = await api.operators.rehearse(body.asked())
    found = Rehearsal(configured=configured_of(told.configured), steps=steps_of(told.steps))
    await exchange.send_json(200, found)


OPERATIONS: Final = (
    Operation(
        "POST",
        "/v1/rehearsals",
        "rehearse",
        rehearse,
        READS,
        (Rehearsal,),
        body=RehearsalBody,
        guard=check_operator,
    ),
)
