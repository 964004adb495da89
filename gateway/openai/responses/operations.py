"""/v1/responses: create, look, come back to the stream, cancel, delete.

A response outlives its client and every process: it is a request of the ledger, and what it was
asked is kept with it (`note`).
"""

import asyncio
import re
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import msgspec
from starlette.datastructures import QueryParams

from gateway.http.exchange import KEY_HEADER, HttpExchange, gone_already, now_s
from gateway.openai.conversations.stored import Contended, StoredConversation
from gateway.openai.generate import HEADERS, with_headers
from gateway.openai.listing import NUMBER, listed, page_of
from gateway.openai.operation import GENERATES, LOOKS, READS, Api, Operation, parameter
from gateway.openai.packing import packed
from gateway.openai.responses.body import ResponseBody
from gateway.openai.responses.conversation import Before, before, fitted, own_turns
from gateway.openai.responses.events import (
    EVENTS,
    Resumed,
    TextStream,
    Told,
    send_response_stream,
)
from gateway.openai.responses.included import INCLUDING, NOT_OF_ITEMS, check_included
from gateway.openai.responses.items import ItemStream
from gateway.openai.responses.note import Note, note_of
from gateway.openai.responses.reply import (
    ID_PREFIX,
    DeletedResponse,
    InputItems,
    InputTokens,
    QueuePlace,
    Response,
    message_id,
)
from gateway.openai.responses.stored import StoredResponse
from gateway.openai.responses.turns import items_of_turns
from gateway.requests.reading import is_read
from gateway.requests.stream import Finished, Generation
from gateway.requests.validation import REQUEST_ID, UINT32_MAX
from gateway.tenants import Tenant
from gateway.values.generation_request import Message
from service_kit.errors import InvalidRequest, KaitenError, NotFound, Unavailable

STREAM: Final = re.compile("(true|1|false|0)?")
# How long who cancels is kept waiting for the end.
CANCEL_S: Final = 5.0
ITEMS: Final = 20
ITEMS_MAX: Final = 100


async def create_response(api: Api, exchange: HttpExchange, body: ResponseBody) -> None:
    """Submit it, and answer as it wants: at once, whole, or event by event."""
    service, tenant = api.generation_service, exchange.tenant
    with body.aliased():
        earlier, own = await _said(api, tenant, body, exchange.header(KEY_HEADER))
        turns = [*earlier.turns, *own]
        asked = body.response_request(await fitted(api, tenant, body, turns), service.limits)
        note = note_of(body, turns, now_s(), service.card.defaults)
        # What is wrong is refused, and no note could hold it, however large a number it is.
        is_kept = body.is_stored and not asked.sampling_wrong
        kept = await packed(note) if is_kept else b""
        goes_on = bool(body.background) or exchange.keeps_running
        named = with_headers(asked, exchange, is_stream=bool(body.stream))
        request = replace(named, keep_running=goes_on, note=kept)
        generation = await service.generate(request, tenant)
    exchange.accepted()
    with service.following(generation):
        public = ID_PREFIX + generation.accepted.request_id
        stored = StoredResponse.of(api, tenant, public, note)
        if generation.visit is not None and generation.visit.is_repeat and kept:
            stored = await _named_before(api, tenant, public)
        if earlier.conversation is not None:
            _check_place(earlier.conversation, stored, note)
            is_named = bool(request.request_id)
            joining = _join(earlier.conversation, generation, own, stored.note, is_named=is_named)
            await _to_its_end(joining)
        if body.stream:
            await _stream(exchange, stored, generation, Resumed())
        elif body.background:
            await exchange.send_json(200, msgspec.structs.replace(stored.begun, status="queued"))
        else:
            response = await stored.collected(generation)
            await _tell_conversation(stored, response)
            await exchange.send_json(200, response)


async def _said(
    api: Api, tenant: Tenant, body: ResponseBody, key: str
) -> tuple[Before, Sequence[Message]]:
    """What came before, and what is asked. What a response went on with may have left since it was
    accepted, whose key comes again.
    """
    try:
        return await before(api, tenant, body, key), await own_turns(api, tenant, body)
    except InvalidRequest:
        if not key or body.conversation_id is not None:
            raise
        with suppress(InvalidRequest, NotFound):
            known = await StoredResponse.find(api, tenant, ID_PREFIX + key)
            return Before(known.note.messages), ()
        raise


async def _named_before(api: Api, tenant: Tenant, public: str) -> StoredResponse:
    """The one of the same key. InvalidRequest: it is gone, and its key stays taken."""
    try:
        return await StoredResponse.find(api, tenant, public)
    except NotFound:
        rule = (
            f"names {public!r}, which was deleted, or came to nothing as its conversation was being"
            " changed; take another key"
        )
        raise InvalidRequest(KEY_HEADER, rule) from None


def _check_place(conversation: StoredConversation, stored: StoredResponse, now: Note) -> None:
    """InvalidRequest: it was asked before its conversation was changed, and whoever was to make it
    a part of that did not live to. Its answer would stand behind what it has not seen.
    """
    if stored.note.turns == now.turns or conversation.content.has_round_of(stored.request_id):
        return
    rule = (
        f"names {stored.begun.id!r}, which is no part of the conversation, and was asked before"
        " that was changed; take another key"
    )
    raise InvalidRequest(KEY_HEADER, rule)


async def _to_its_end(work: Coroutine[Any, Any, None]) -> None:
    """Whoever asked may leave meanwhile: what was begun is done before it is given up."""
    doing = asyncio.ensure_future(work)
    try:
        await asyncio.shield(doing)
    except asyncio.CancelledError:
        await asyncio.wait({doing})
        raise


async def _join(
    conversation: StoredConversation,
    generation: Generation,
    turns: Sequence[Message],
    note: Note,
    *,
    is_named: bool,
) -> None:
    """It becomes a part of the conversation, or of nothing: unless the store is away and its client
    has named it, who then asks again, and may be asking elsewhere already.
    """
    request_id = generation.accepted.request_id
    try:
        await conversation.join(request_id, turns, len(note.turns) - len(turns))
    except KaitenError as error:
        if is_named and isinstance(error, Unavailable) and not isinstance(error, Contended):
            generation.keep_running = True
        elif generation.visit is None or not generation.visit.is_repeat:
            await conversation.api.generation_service.forget(request_id, conversation.tenant)
        raise


async def _tell_conversation(stored: StoredResponse, over: Response) -> None:
    """What one that has ended said becomes items there, if nobody has looked since: they stay when
    it leaves. Before its end is told: then whoever hears of it may rely on that, and nothing is
    done for who has their answer. Who comes next does it if we cannot.
    """
    with suppress(KaitenError):
        await _keep_said(stored, over)


async def _keep_said(stored: StoredResponse, over: Response) -> None:
    """NotFound: its conversation is not there any more."""
    if (name := stored.note.asked.conversation) is not None:
        await StoredConversation.told(stored.api, stored.tenant, name.id, over)


async def count_input_tokens(api: Api, exchange: HttpExchange, body: ResponseBody) -> None:
    """How many tokens the prompt of such a response has. Nothing is computed."""
    tenant = exchange.tenant
    with body.aliased():
        earlier = await before(api, tenant, body)
        said = [*earlier.turns, *await own_turns(api, tenant, body)]
        turns = await fitted(api, tenant, body, said)
        ids = await api.generation_service.tokenize(
            body.response_request(turns, api.generation_service.limits), tenant
        )
    await exchange.send_json(200, InputTokens(input_tokens=len(ids)))


async def get_response(api: Api, exchange: HttpExchange, _body: None) -> None:
    """Its state, all of it, or its stream."""
    tenant, service = exchange.tenant, api.generation_service
    stored = await StoredResponse.find(api, tenant, exchange.path["id"])
    query = QueryParams(exchange.scope["query_string"])
    check_included(exchange, no_logprobs=_no_logprobs(stored.note))
    resumed = _resumed(query.get("starting_after", ""))
    stream = query.get("stream", "")
    if not STREAM.fullmatch(stream):
        raise InvalidRequest("stream", f"must be true or false, got {stream[:64]!r}")
    if stream in ("true", "1"):
        is_whole = is_read(service.card, stored.note.tool_names)
        start = 0 if is_whole else resumed.position
        # Somebody who only looks does not end what others wait for.
        generation = await service.attach(stored.request_id, tenant, [start], keep_running=True)
        with service.following(generation):
            await _stream(exchange, stored, generation, resumed)
        return
    status, begun = await service.status(stored.request_id, tenant), stored.begun
    if status.replay is not None:
        response = await stored.collected(status.replay)
        await _tell_conversation(stored, response)
        await exchange.send_json(200, response)
    elif status.queue.position is not None:
        place = QueuePlace(status.queue.position, status.queue.reason)
        await exchange.send_json(200, msgspec.structs.replace(begun, status="queued", queue=place))
    else:
        await exchange.send_json(200, begun)


async def cancel_response(api: Api, exchange: HttpExchange, _body: None) -> None:
    """The response as it ended, then or before."""
    stored = await StoredResponse.find(api, exchange.tenant, exchange.path["id"])
    await api.generation_service.cancel(stored.request_id, exchange.tenant)
    try:
        async with asyncio.timeout(CANCEL_S):
            response = await stored.whole()
    except TimeoutError:
        # Nobody schedules at the moment. It is accepted, and will be done.
        response = stored.begun
    else:
        await _tell_conversation(stored, response)
    await exchange.send_json(200, response)


async def delete_response(api: Api, exchange: HttpExchange, _body: None) -> None:
    """Nobody finds it any more, what it was asked and its text are gone, but for its conversation's
    items.
    """
    public, service = exchange.path["id"], api.generation_service
    with gone_already(exchange):
        stored = await StoredResponse.find(api, exchange.tenant, public)
        # Whether it has ended is asked by what ends it: in between nothing can.
        if not await service.cancel(stored.request_id, exchange.tenant):
            over = await stored.whole()
            with suppress(NotFound):
                await _keep_said(stored, over)
        await service.forget(stored.request_id, exchange.tenant)
    await exchange.send_json(200, DeletedResponse(id=public))


async def list_input_items(api: Api, exchange: HttpExchange, _body: None) -> None:
    """What it was asked, with the conversation before it; the newest first."""
    public = exchange.path["id"]
    check_included(exchange, no_logprobs=NOT_OF_ITEMS)
    stored = await StoredResponse.find(api, exchange.tenant, public)
    items = items_of_turns(message_id(public), stored.note.messages)
    # The newest first, as all lists are.
    reply = InputItems(**page_of(items[::-1], exchange, most=ITEMS_MAX, default=ITEMS))
    await exchange.send_json(200, reply)


async def _stream(
    exchange: HttpExchange, stored: StoredResponse, generation: Generation, resumed: Resumed
) -> None:
    parts = stored.parts(generation)

    async def finish(end: Finished, told: Told | None) -> Response:
        ended = await stored.whole() if told is None else stored.ended(told, end, parts.ends())
        await _tell_conversation(stored, ended)
        return ended

    ping_s = stored.api.config.sse_ping_s
    stream = (ItemStream if generation.is_parsed else TextStream)(stored.begun, resumed)
    await send_response_stream(exchange, stream, parts, finish, resumed=resumed, ping_s=ping_s)


def _no_logprobs(note: Note) -> str:
    """Why there are none, if so."""
    return "" if note.with_logprobs else "was not asked for with the response"


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
    parameter("query", "stream", STREAM.pattern, "true or 1: a stream"),
    INCLUDING,
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
    Operation(
        "POST",
        "/v1/responses/input_tokens",
        "countInputTokens",
        count_input_tokens,
        READS,
        (InputTokens,),
        (),
        ResponseBody,
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
        (ID, INCLUDING, *listed(ITEMS_MAX, ITEMS)),
    ),
)
