"""A response as the ledger has it: what it was asked, and what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import msgspec

from gateway.openai.chat import ChatTokenLogprob, token_logprobs
from gateway.openai.operation import Api
from gateway.openai.packing import unpacked
from gateway.openai.parts import Fields, Parts, Shown
from gateway.openai.responses.events import Told
from gateway.openai.responses.items import item_status, items_of
from gateway.openai.responses.note import Note
from gateway.openai.responses.reply import (
    ID_PREFIX,
    IncompleteDetails,
    OutputItem,
    OutputMessage,
    OutputText,
    Response,
    ResponseProblem,
    Status,
    message_id,
    usage_of,
)
from gateway.openai.usage import Timing
from gateway.requests.replay import Replay
from gateway.requests.stream import Finished, Generation
from gateway.requests.validation import REQUEST_ID
from gateway.tenants import Tenant
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import InvalidRequest, NotFound, Unsatisfiable

STATES: Final[dict[FinishReason, Status]] = {
    FinishReason.FINISH_REASON_STOP: "completed",
    FinishReason.FINISH_REASON_LENGTH: "incomplete",
    FinishReason.FINISH_REASON_CANCELLED: "cancelled",
}


def request_id_of(public: str, field: str = "id") -> str:
    request_id = public.removeprefix(ID_PREFIX)
    if request_id == public or not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(field, f"must match {ID_PREFIX}{REQUEST_ID.pattern}")
    return request_id


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`begun`: as it is told until it has ended."""

    api: Api
    tenant: Tenant
    note: Note
    begun: Response

    @classmethod
    def of(cls, api: Api, tenant: Tenant, public: str, note: Note) -> Self:
        asked = msgspec.structs.asdict(note.asked) | {"model": api.generation_service.card.name}
        return cls(api, tenant, note, Response(**asked, id=public, status="in_progress"))

    @classmethod
    async def find(cls, api: Api, tenant: Tenant, public: str) -> Self:
        """NotFound: no such response, or it was not to be stored, or it is not kept any more."""
        try:
            kept = await api.generation_service.note(request_id_of(public), tenant)
            note = await unpacked(kept, Note)
        except NotFound as error:
            why = f"{error.why}; with store: false none is"
            raise NotFound(f"response {public!r}", why) from None
        return cls.of(api, tenant, public, note)

    @property
    def request_id(self) -> str:
        return request_id_of(self.begun.id)

    async def over(self) -> Response | None:
        """As `whole`; None: it has not ended yet. Of a gateway that drains or is full, too."""
        status = await self.api.generation_service.status(self.request_id, self.tenant)
        return None if status.replay is None else await self.collected(status.replay)

    async def whole(self) -> Response:
        """At its end."""
        service = self.api.generation_service
        if (over := await self.over()) is not None:
            return over
        generation = await service.attach(self.request_id, self.tenant, keep_running=True)
        with service.following(generation):
            return await self.collected(generation)

    async def collected(self, generation: Generation | Replay) -> Response:
        parts = self.parts(generation)
        (whole,) = await parts.collect(is_strict=False)
        assert whole.end is not None
        items = items_of(whole, self.begun.id) if generation.is_parsed else None
        told = Told(whole.text, token_logprobs(whole.logprobs or ()), items)
        return self.ended(told, whole.end, parts.ends())

    def parts(self, generation: Generation | Replay) -> Parts:
        return Parts([generation], self.api.formatter, Shown(logprobs=self.note.with_logprobs))

    def ended(self, told: Told, end: Finished, ends: Fields) -> Response:
        begun, status = self.begun, STATES.get(end.reason, "failed")
        item = OutputMessage(
            id=message_id(begun.id),
            status=item_status(end),
            content=[OutputText(text=told.text, logprobs=told.logprobs)],
        )
        output = [item] if told.items is None else _with_logprobs(told.items, told.logprobs)
        return msgspec.structs.replace(
            begun,
            status=status,
            completed_at=_completed_at(begun, ends["kaiten"]) if status == "completed" else None,
            output=output,
            error=_problem(end) if status == "failed" else None,
            incomplete_details=IncompleteDetails() if status == "incomplete" else None,
            usage=usage_of(ends["usage"]),
            kaiten=ends["kaiten"],
        )


def _completed_at(begun: Response, took: Timing) -> int:
    """The same at every gateway and whenever it is asked."""
    took_ms = took.queue_ms + took.prefill_ms + took.decode_ms
    return begun.created_at + round(took_ms / 1000)


def _with_logprobs(
    items: Sequence[OutputItem], logprobs: list[ChatTokenLogprob]
) -> list[OutputItem]:
    """Those of all tokens of the output, at its first text."""
    found = list(items)
    index = next((i for i, each in enumerate(found) if isinstance(each, OutputMessage)), None)
    if logprobs and index is not None:
        item = found[index]
        assert isinstance(item, OutputMessage)
        content = [OutputText(text=item.content[0].text, logprobs=logprobs)]
        found[index] = msgspec.structs.replace(item, content=content)
    return found


def _problem(end: Finished) -> ResponseProblem:
    if end.is_unsatisfiable:
        return ResponseProblem("invalid_prompt", str(Unsatisfiable(end.error)))
    if end.reason == FinishReason.FINISH_REASON_DEADLINE_EXCEEDED:
        return ResponseProblem("server_error", end.error or "the request's time ran out")
    message = end.error or "the system could not compute this response"
    return ResponseProblem("server_error", message)
