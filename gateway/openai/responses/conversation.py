"""The conversation that a response answers: what came before, what is referred to, what fits."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from gateway.http.json_body import cut
from gateway.openai.conversations.stored import StoredConversation
from gateway.openai.operation import Api
from gateway.openai.responses.body import InputItem, ResponseBody
from gateway.openai.responses.reply import ID_PREFIX, NUMBERED, OutputItem
from gateway.openai.responses.stored import StoredResponse, request_id_of
from gateway.openai.responses.turns import as_input, turns_of_items
from gateway.requests.validation import REQUEST_ID
from gateway.tenants import Tenant
from gateway.values.generation_request import Message
from service_kit.errors import InvalidRequest, NotFound, TooLong

# Each is read whole.
REFERENCED_MAX: Final = 64


class Before(NamedTuple):
    """The turns that `input` goes on with, and whose they are if not those of a response."""

    turns: Sequence[Message]
    conversation: StoredConversation | None = None


async def before(api: Api, tenant: Tenant, body: ResponseBody, request_id: str = "") -> Before:
    """Without the instructions. `request_id`: as the client named it, perhaps not for the first
    time; then what came before it then.
    """
    if (id := body.conversation_id) is None:
        turns = await _earlier(api, tenant, body.previous_response_id)
        return Before(_written(turns, "previous_response_id"))
    field = "conversation"
    try:
        found = await StoredConversation.find(api, tenant, id, field=field)
    except NotFound as error:
        raise InvalidRequest(field, f"names {id!r}, which is not here: {error.why}") from None
    waiting = found.content.open_round
    if waiting is not None and not found.content.has_round_of(request_id):
        response = f"{ID_PREFIX}{waiting.request_id}"
        raise InvalidRequest(field, f"names {id!r}, whose {response} has not ended yet")
    turns = turns_of_items(found.content.before(request_id).items)
    return Before(_written(turns, field), found)


def _written(turns: Sequence[Message], field: str) -> Sequence[Message]:
    """What is wrong with them is wrong with the field that names them."""
    return [replace(each, place=field) for each in turns]


async def own_turns(api: Api, tenant: Tenant, body: ResponseBody) -> Sequence[Message]:
    """Those of `input`."""
    return body.turns(await _referenced(api, tenant, body))


async def fitted(
    api: Api, tenant: Tenant, body: ResponseBody, turns: Sequence[Message]
) -> Sequence[Message]:
    """Those that leave room for the output, if the body wants it so."""
    if body.truncation != "auto":
        return turns
    service = api.generation_service
    room = service.limits.context_tokens_max - (body.max_output_tokens or 1)

    async def fits(kept: Sequence[Message]) -> bool:
        try:
            ids = await service.tokenize(body.response_request(kept, service.limits), tenant)
        except TooLong:
            return False
        return len(ids) <= room

    return await newest(turns, fits)


async def newest(
    turns: Sequence[Message], fits: Callable[[Sequence[Message]], Awaitable[bool]]
) -> Sequence[Message]:
    """As many of the newest turns as fit, behind the system messages that begin the conversation.

    They begin with what a user said: an answer, or what came of a call, is nothing without what it
    belongs to. `fits` is asked log2 of the turns times, and is taken to say no of more turns than
    it said no of. If not even the last question fits, that is what is left.
    """
    head = next((i for i, each in enumerate(turns) if each.role != "system"), len(turns))
    questions = [i for i in range(head + 1, len(turns)) if turns[i].role == "user"]

    def since(cut: int) -> Sequence[Message]:
        return [*turns[:head], *turns[questions[cut - 1] :]] if cut else turns

    fewest, most = 0, len(questions)
    while fewest < most:
        # All of them first, which mostly fit.
        middle = (fewest + most) // 2 if fewest else 0
        if await fits(since(middle)):
            most = middle
        else:
            fewest = middle + 1
    return since(fewest)


async def _earlier(api: Api, tenant: Tenant, public: str | None) -> Sequence[Message]:
    """The conversation that ends with a response."""
    if public is None:
        return ()
    field = "previous_response_id"
    request_id_of(public, field)
    try:
        stored = await StoredResponse.find(api, tenant, public)
        response = await stored.over()
    except NotFound as error:
        rule = f"names {public!r}, which is not here: {error.why}"
        raise InvalidRequest(field, rule) from None
    if response is None:
        raise InvalidRequest(field, f"names {public!r}, which has not ended yet")
    if response.error is not None:
        raise InvalidRequest(field, f"names {public!r}, which failed: {response.error.message}")
    return [*stored.note.messages, *turns_of_items(response.output)]


async def _referenced(api: Api, tenant: Tenant, body: ResponseBody) -> dict[str, InputItem]:
    """What the references of `input` name, by the id of each."""
    items: dict[str, InputItem] = {}
    read: set[str] = set()
    for index, id in body.references():
        request_id = origin_of(id)
        if request_id and request_id not in read:
            read.add(request_id)
            if len(read) > REFERENCED_MAX:
                rule = f"must not refer to more than {REFERENCED_MAX} responses"
                raise InvalidRequest("input", rule)
            output = await _output(api, tenant, request_id)
            items |= {item.id: as_input(item) for item in output}
        if id not in items:
            rule = f"names {cut(repr(id))}, which no response that ended and is still here has said"
            raise InvalidRequest(f"input.{index}.id", rule)
    return items


def origin_of(id: str) -> str:
    """The request whose output it may be of; "": of none. Calls are numbered, and of a request's
    messages those behind the first.
    """
    kind, _, rest = id.partition("_")
    numbered = {"msg": rest.partition(NUMBERED)[0], "rs": rest, "fc": rest.rpartition("_")[0]}
    origin = numbered.get(kind, "")
    return origin if REQUEST_ID.fullmatch(origin) else ""


async def _output(api: Api, tenant: Tenant, request_id: str) -> Sequence[OutputItem]:
    """Nothing: there is no such response, or it has not ended."""
    try:
        stored = await StoredResponse.find(api, tenant, ID_PREFIX + request_id)
        response = await stored.over()
        return () if response is None else response.output
    except NotFound:
        return ()
