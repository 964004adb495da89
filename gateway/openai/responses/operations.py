"""/v1/responses: create, look, come back to the stream, cancel, delete.

A response outlives its client and every process: it is a request of the ledger, and what it was
asked is kept with it (`note`).
"""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams

from gateway.http.exchange import Exchange, now_s
from gateway.openai.chat import ChatTokenLogprob, token_logprobs
from gateway.openai.generate import HEADERS, with_headers
from gateway.openai.listing import NUMBER, listed, page_of
from gateway.openai.operation import GENERATES, LOOKS, Api, Operation, parameter
from gateway.openai.parts import Fields, Parts, Shown
from gateway.openai.responses.body import ResponseBody
from gateway.openai.responses.events import (
    EVENTS,
    Resumed,
    TextStream,
    Told,
    send_response_stream,
)
from gateway.openai.responses.items import ItemStream, item_status, items_of
from gateway.openai.responses.note import Note, note_of, packed, unpacked
from gateway.openai.responses.reply import (
    ID_PREFIX,
    CallItem,
    CallOutputItem,
    DeletedResponse,
    IncompleteDetails,
    InputItem,
    InputItems,
    InputTextReply,
    OutputItem,
    OutputMessage,
    OutputText,
    QueuePlace,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseProblem,
    Status,
    message_id,
    usage_of,
)
from gateway.openai.usage import Timing
from gateway.requests.reading import is_read
from gateway.requests.stream import Finished, Generation
from gateway.requests.validation import REQUEST_ID, UINT32_MAX
from gateway.tenants import Tenant
from gateway.values.generation_request import Message, ToolCall
from kaiten.v1.common_pb2 import FinishReason
from service_kit.errors import InvalidRequest, NotFound

STATES: Final[dict[FinishReason, Status]] = {
    FinishReason.FINISH_REASON_STOP: "completed",
    FinishReason.FINISH_REASON_LENGTH: "incomplete",
    FinishReason.FINISH_REASON_CANCELLED: "cancelled",
}
# How long who cancels is kept waiting for the end.
CANCEL_S: Final = 5.0
ITEMS: Final = 20
ITEMS_MAX: Final = 100


async def create_response(api: Api, exchange: Exchange, body: ResponseBody) -> None:
    """Submit it, and answer as it wants: at once, whole, or event by event."""
    front, tenant = api.front, exchange.tenant
    with body.aliased():
        turns = [*await _earlier(api, tenant, body.previous_response_id), *body.turns()]
        ask = with_headers(body.response_ask(turns, front.limits), exchange)
        note = note_of(body, turns, now_s(), front.card.defaults)
        kept = await packed(note) if body.is_stored else b""
        goes_on = bool(body.background) or exchange.keeps_running
        ask = replace(ask, keep_running=goes_on, note=kept)
        generation = await front.generate(ask, tenant)
    exchange.accepted()
    with front.following(generation, keep_running=ask.keep_running):
        public = ID_PREFIX + generation.accepted.request_id
        if generation.visit is not None and generation.visit.is_repeat and kept:
            note = await _note(api, tenant, public)
        begun = _begun(api, public, note)
        if body.stream:
            await _stream(api, exchange, begun, generation, note, Resumed())
        elif body.background:
            await exchange.send_json(200, msgspec.structs.replace(begun, status="queued"))
        else:
            await exchange.send_json(200, await _collected(api, begun, generation, note))


async def get_response(api: Api, exchange: Exchange, _body: None) -> None:
    """Its state, all of it, or its stream."""
    public, tenant, front = exchange.path["id"], exchange.tenant, api.front
    request_id, note = _request_id(public), await _note(api, tenant, public)
    begun = _begun(api, public, note)
    query = QueryParams(exchange.scope["query_string"])
    resumed = _resumed(query.get("starting_after", ""))
    if query.get("stream", "") in ("true", "1"):
        is_whole = is_read(front.card, note.tool_names)
        start = 0 if is_whole else resumed.position
        generation = await front.attach(request_id, tenant, [start])
        # Somebody who only looks does not end what others wait for.
        with front.following(generation, keep_running=True):
            await _stream(api, exchange, begun, generation, note, resumed)
        return
    seen = await front.look(request_id, tenant)
    if seen.done is not None:
        await exchange.send_json(200, await _whole(api, tenant, begun, note))
    elif seen.place.position is not None:
        place = QueuePlace(seen.place.position, seen.place.reason)
        await exchange.send_json(200, msgspec.structs.replace(begun, status="queued", queue=place))
    else:
        await exchange.send_json(200, begun)


async def cancel_response(api: Api, exchange: Exchange, _body: None) -> None:
    """The response as it ended, then or before."""
    public, tenant = exchange.path["id"], exchange.tenant
    request_id, note = _request_id(public), await _note(api, tenant, public)
    await api.front.cancel(request_id, tenant)
    begun = _begun(api, public, note)
    try:
        async with asyncio.timeout(CANCEL_S):
            response = await _whole(api, tenant, begun, note)
    except TimeoutError:
        # Nobody schedules at the moment. It is accepted, and will be done.
        response = begun
    await exchange.send_json(200, response)


async def delete_response(api: Api, exchange: Exchange, _body: None) -> None:
    """Nobody finds it any more, its conversation and its text are gone."""
    public, tenant = exchange.path["id"], exchange.tenant
    await _note(api, tenant, public)
    await api.front.forget(_request_id(public), tenant)
    await exchange.send_json(200, DeletedResponse(id=public))


async def list_input_items(api: Api, exchange: Exchange, _body: None) -> None:
    """What it was asked, with the conversation before it; the newest first."""
    public = exchange.path["id"]
    note = await _note(api, exchange.tenant, public)
    # The newest first, as all lists are.
    turns = enumerate(note.messages)
    items = [item for index, each in turns for item in _items(public, index, each)][::-1]
    reply = InputItems(**page_of(items, exchange, most=ITEMS_MAX, default=ITEMS))
    await exchange.send_json(200, reply)


async def _stream(
    api: Api,
    exchange: Exchange,
    begun: Response,
    generation: Generation,
    note: Note,
    resumed: Resumed,
) -> None:
    parts = _parts(api, generation, note)

    async def finish(end: Finished, told: Told | None) -> Response:
        if told is None:
            return await _whole(api, exchange.tenant, begun, note)
        return _ended(begun, told, end, parts.ends())

    ping_s = api.config.sse_ping_s
    stream = (ItemStream if generation.is_parsed else TextStream)(begun, resumed)
    await send_response_stream(exchange, stream, parts, finish, resumed=resumed, ping_s=ping_s)


def _parts(api: Api, generation: Generation, note: Note) -> Parts:
    return Parts([generation], api.formatter, Shown(logprobs=note.with_logprobs))


async def _whole(api: Api, tenant: Tenant, begun: Response, note: Note) -> Response:
    """At its end."""
    generation = await api.front.attach(_request_id(begun.id), tenant)
    with api.front.following(generation, keep_running=True):
        return await _collected(api, begun, generation, note)


async def _collected(api: Api, begun: Response, generation: Generation, note: Note) -> Response:
    parts = _parts(api, generation, note)
    (whole,) = await parts.collect(is_strict=False)
    assert whole.end is not None
    items = items_of(whole, begun.id) if generation.is_parsed else None
    told = Told(whole.text, token_logprobs(whole.logprobs or ()), items)
    return _ended(begun, told, whole.end, parts.ends())


def _begun(api: Api, public: str, note: Note) -> Response:
    asked = msgspec.structs.asdict(note.asked)
    return Response(**asked, id=public, status="in_progress", model=api.front.card.name)


def _ended(begun: Response, told: Told, end: Finished, ends: Fields) -> Response:
    status = STATES.get(end.reason, "failed")
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
        error=ResponseProblem("server_error", _problem(end)) if status == "failed" else None,
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


def _problem(end: Finished) -> str:
    if end.reason == FinishReason.FINISH_REASON_DEADLINE_EXCEEDED:
        return end.error or "the request's time ran out"
    return end.error or "the system could not compute this response"


def _items(public: str, index: int, message: Message) -> Iterator[Any]:
    """What a turn is told as."""
    id, text = f"{message_id(public)}_{index}", message.content
    if message.tool_call_id:
        yield CallOutputItem(id=id, call_id=message.tool_call_id, output=text or "")
        return
    if message.reasoning:
        thought = [ReasoningText(message.reasoning)]
        yield ReasoningItem(id=f"{id}_r", content=thought, status="completed")
    if text is not None:
        kind: Any = "output_text" if message.role == "assistant" else "input_text"
        yield InputItem(id=id, role=message.role, content=[InputTextReply(kind, text)])
    for number, call in enumerate(message.tool_calls):
        yield CallItem(
            id=f"{id}_{number}",
            call_id=call.id,
            name=call.name,
            arguments=call.arguments,
            status="completed",
        )


async def _note(api: Api, tenant: Tenant, public: str) -> Note:
    """NotFound: no such response, or it was not to be stored, or it is not kept any more."""
    try:
        return await unpacked(await api.front.note(_request_id(public), tenant))
    except NotFound as error:
        why = f"{error.why}; with store: false none is"
        raise NotFound(f"response {public!r}", why) from None


async def _earlier(api: Api, tenant: Tenant, public: str | None) -> Sequence[Message]:
    """The conversation that ends with a response."""
    if public is None:
        return ()
    field = "previous_response_id"
    request_id = _request_id(public, field)
    try:
        note = await _note(api, tenant, public)
        seen = await api.front.look(request_id, tenant)
        if seen.done is None:
            raise InvalidRequest(field, f"names {public!r}, which has not ended yet")
        before = await _whole(api, tenant, _begun(api, public, note), note)
    except NotFound as error:
        rule = f"names {public!r}, which is not here: {error.why}"
        raise InvalidRequest(field, rule) from None
    if before.error is not None:
        raise InvalidRequest(field, f"names {public!r}, which failed: {before.error.message}")
    return [*note.messages, _answer(before)]


def _answer(response: Response) -> Message:
    """What it said, as a turn of the conversation."""
    texts, thoughts, calls = [], [], []
    for item in response.output:
        match item:
            case CallItem():
                calls.append(ToolCall(id=item.call_id, name=item.name, arguments=item.arguments))
            case ReasoningItem():
                thoughts += [part.text for part in item.content]
            case OutputMessage():
                texts += [part.text for part in item.content]
    return Message(
        role="assistant",
        content="".join(texts) or (None if calls else ""),
        reasoning="".join(thoughts),
        tool_calls=tuple(calls),
    )


def _request_id(public: str, field: str = "id") -> str:
    request_id = public.removeprefix(ID_PREFIX)
    if request_id == public or not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(field, f"must match {ID_PREFIX}{REQUEST_ID.pattern}")
    return request_id


def _resumed(starting_after: str) -> Resumed:
    if not starting_after:
        return Resumed()
    if not NUMBER.fullmatch(starting_after) or int(starting_after) > UINT32_MAX:
        rule = f"must be the sequence_number of an event, got {starting_after[:64]!r}"
        raise InvalidRequest("starting_after", rule)
    return Resumed(int(starting_after))


PATH: Final = "/v1/responses/{id}"
ID: Final = parameter("path", "id", f"{ID_PREFIX}{REQUEST_ID.pattern}", "as its answer has it")
RESUMING: Final = (
    ID,
    parameter("query", "starting_after", f"({NUMBER.pattern})?", "number of the last event known"),
    parameter("query", "stream", "", "true or 1: a stream"),
)
WHOLE: Final = (Response,)
OPERATIONS: Final = (
    Operation(
        "POST",
        "/v1/responses",
        "createResponse",
        create_response,
        GENERATES,
        WHOLE,
        HEADERS,
        ResponseBody,
        EVENTS,
    ),
    Operation("GET", PATH, "getResponse", get_response, LOOKS, WHOLE, RESUMING, None, EVENTS),
    Operation("DELETE", PATH, "deleteResponse", delete_response, LOOKS, (DeletedResponse,), (ID,)),
    Operation("POST", f"{PATH}/cancel", "cancelResponse", cancel_response, LOOKS, WHOLE, (ID,)),
    Operation(
        "GET",
        f"{PATH}/input_items",
        "listInputItems",
        list_input_items,
        LOOKS,
        (InputItems,),
        (ID, *listed(ITEMS_MAX, ITEMS)),
    ),
)
