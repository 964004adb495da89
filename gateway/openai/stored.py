"""Accepted requests by their id: look, come back to the stream, cancel.

`starting_after` is the number of output tokens the client has, one per choice, separated by commas;
chunks say it as `position`. What follows is exactly what it does not have.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, cast

from msgspec import UNSET, Struct, UnsetType
from starlette.datastructures import QueryParams

from gateway.http.exchange import Exchange
from gateway.openai.chat import CHAT, ChatChunk
from gateway.openai.completions import COMPLETION, CompletionChunk
from gateway.openai.logprobs import PromptLogprobs
from gateway.openai.operation import LOOKS, Api, Operation, parameter
from gateway.openai.parts import Format, Parts, Shown, head_of, send_stream
from gateway.openai.usage import Count, Timing, Usage
from gateway.requests.service import Seen
from gateway.requests.validation import REQUEST_ID, UINT32_MAX
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import InvalidRequest

FORMATS: Final = (CHAT, COMPLETION)
End = Literal["stop", "length", "cancelled", "deadline_exceeded", "error"]
State = Literal["completed", "cancelled", "expired", "failed"]
POSITIONS: Final = re.compile(r"([0-9]{1,10}(,[0-9]{1,10})*)?", re.ASCII)
# The worst end of a choice is the state of its request.
STATES: Final[Mapping[End, State]] = {
    "error": "failed",
    "deadline_exceeded": "expired",
    "cancelled": "cancelled",
}


class RequestReply(Struct, kw_only=True):
    id: str
    object: Literal["request"] = "request"


class QueuePlace(Struct):
    position: Count
    reason: str


class LiveRequest(RequestReply, kw_only=True):
    status: Literal["queued", "in_progress"] = "in_progress"
    queue: QueuePlace | UnsetType = UNSET


class FinishedChoice(Struct):
    index: Count
    text: str
    finish_reason: End
    output_tokens: Count
    error: str | UnsetType = UNSET


class FinishedRequest(RequestReply, kw_only=True):
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    status: State
    model: str
    choices: list[FinishedChoice]
    usage: Usage
    kaiten: Timing


class CancelledRequest(RequestReply, kw_only=True):
    was_live: bool


async def get_request(api: Api, exchange: Exchange, _body: None) -> None:
    """What there is of it so far, all of it, or its stream."""
    public, tenant = exchange.path["id"], exchange.tenant
    request_id, form = _parsed(public)
    query = QueryParams(exchange.scope["query_string"])
    positions = _positions(query.get("starting_after", ""))
    is_streaming = "text/event-stream" in exchange.header("accept")
    is_streaming = is_streaming or query.get("stream", "") in ("true", "1")
    if not is_streaming:
        seen = await api.front.look(request_id, tenant)
        if seen.done is None:
            await exchange.send_json(200, _live(public, seen))
            return
    generation = await api.front.attach(request_id, tenant, positions)
    # Somebody who only looks does not end what others wait for: DELETE does.
    with api.front.following(generation, keep_running=True):
        if is_streaming:
            parts = Parts([generation], api.formatter, Shown(positions=True))
            head = head_of(public, api.front.card.name)
            ping_s = api.config.sse_ping_s
            await send_stream(exchange, form, head, parts, with_usage=True, ping_s=ping_s)
        else:
            shown = Shown(logprobs=False, prompt_logprobs=UINT32_MAX)
            parts = Parts([generation], api.formatter, shown)
            await exchange.send_json(200, await _finished(public, api.front.card.name, parts))


async def cancel_request(api: Api, exchange: Exchange, _body: None) -> None:
    public = exchange.path["id"]
    was_live = await api.front.cancel(_parsed(public)[0], exchange.tenant)
    await exchange.send_json(200, CancelledRequest(id=public, was_live=was_live))


async def _finished(public: str, model: str, parts: Parts) -> FinishedRequest:
    wholes = await parts.collect(is_strict=False)
    choices = [
        FinishedChoice(
            whole.choice, whole.text, _word(end.reason), end.output_tokens, end.error or UNSET
        )
        for whole in wholes
        if (end := whole.end) is not None
    ]
    reasons = {choice.finish_reason for choice in choices}
    return FinishedRequest(
        id=public,
        prompt_logprobs=wholes[0].prompt_logprobs,
        status=next((state for reason, state in STATES.items() if reason in reasons), "completed"),
        model=model,
        choices=choices,
        **parts.ends(),
    )


def _word(reason: FinishReason) -> End:
    word = FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
    return cast(End, word)


def _live(public: str, seen: Seen) -> LiveRequest:
    if seen.place.position is None:
        return LiveRequest(id=public)
    queue = QueuePlace(seen.place.position, seen.place.reason)
    return LiveRequest(id=public, status="queued", queue=queue)


def _parsed(public: str) -> tuple[str, Format]:
    """The request's own id, and how its chunks look: both are in the id its client was given."""
    form = next((each for each in FORMATS if public.startswith(each.id_prefix)), FORMATS[-1])
    request_id = public.removeprefix(form.id_prefix)
    if not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("id", f"must match {REQUEST_ID.pattern}")
    return request_id, form


def _positions(text: str) -> Sequence[int]:
    positions = [int(part) for part in text.split(",") if part] if POSITIONS.fullmatch(text) else []
    if bool(positions) != bool(text) or any(each > UINT32_MAX for each in positions):
        rule = "must be token counts, one per choice, separated by commas"
        raise InvalidRequest("starting_after", rule)
    return positions


ID: Final = parameter(
    "path", "id", f"(chatcmpl-|cmpl-)?{REQUEST_ID.pattern}", "as its answer has it"
)
RESUMING: Final = (
    ID,
    parameter(
        "query",
        "starting_after",
        POSITIONS.pattern,
        "output tokens the client has, one number per choice, separated by commas",
    ),
    parameter("query", "stream", "", "true or 1: a stream, as accept: text/event-stream"),
)
PATH: Final = "/v1/requests/{id}"
FOUND: Final = (LiveRequest, FinishedRequest)
GONE: Final = (CancelledRequest,)
CHUNKS: Final = (ChatChunk, CompletionChunk)
OPERATIONS: Final = (
    Operation("GET", PATH, "getRequest", get_request, LOOKS, FOUND, RESUMING, None, CHUNKS),
    Operation("DELETE", PATH, "deleteRequest", cancel_request, LOOKS, GONE, (ID,)),
    Operation("POST", f"{PATH}/cancel", "cancelRequest", cancel_request, LOOKS, GONE, (ID,)),
)
