"""The conversation that a response answers: what came before, what is referred to, what fits."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final

from gateway.http.json_body import cut
from gateway.openai.operation import Api
from gateway.openai.responses.body import (
    FunctionCallInput,
    InputItem,
    InputMessage,
    InputReasoningText,
    ReasoningInput,
    ResponseBody,
)
from gateway.openai.responses.reply import (
    ID_PREFIX,
    CallItem,
    OutputItem,
    OutputMessage,
    ReasoningItem,
)
from gateway.openai.responses.stored import StoredResponse, request_id_of
from gateway.requests.validation import REQUEST_ID, PromptTooLong
from gateway.tenants import Tenant
from gateway.values.generation_request import Message
from service_kit.errors import InvalidRequest, NotFound

# Each is read whole.
REFERENCED_MAX: Final = 64


async def conversation(api: Api, tenant: Tenant, body: ResponseBody) -> Sequence[Message]:
    """All turns, without the instructions."""
    before = await _earlier(api, tenant, body.previous_response_id)
    return [*before, *body.turns(await _referenced(api, tenant, body))]


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
        except PromptTooLong:
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
        status = await api.generation_service.status(stored.request_id, tenant)
        if status.done is None:
            raise InvalidRequest(field, f"names {public!r}, which has not ended yet")
        before = await stored.whole()
    except NotFound as error:
        rule = f"names {public!r}, which is not here: {error.why}"
        raise InvalidRequest(field, rule) from None
    if before.error is not None:
        raise InvalidRequest(field, f"names {public!r}, which failed: {before.error.message}")
    answer: list[Message] = []
    for item in before.output:
        _as_input(item).added_to(answer)
    return [*stored.note.messages, *answer]


async def _referenced(api: Api, tenant: Tenant, body: ResponseBody) -> dict[str, InputItem]:
    """What the references of `input` name, by the id of each."""
    items: dict[str, InputItem] = {}
    read: set[str] = set()
    for index, id in body.references():
        for request_id in origins_of(id):
            if id in items or request_id in read:
                continue
            output = await _output(api, tenant, request_id)
            if output is None:
                continue
            read.add(request_id)
            if len(read) > REFERENCED_MAX:
                rule = f"must not refer to more than {REFERENCED_MAX} responses"
                raise InvalidRequest("input", rule)
            items |= {item.id: _as_input(item) for item in output}
        if id not in items:
            rule = f"names {cut(repr(id))}, which no response that ended and is still here has said"
            raise InvalidRequest(f"input.{index}.id", rule)
    return items


def origins_of(id: str) -> Iterator[str]:
    """The requests whose output it may be of. Calls are numbered; of a request's messages only
    those behind the first are, and its own id may end like that.
    """
    kind, _, rest = id.partition("_")
    numbered = rest.rpartition("_")[0]
    candidates = {"msg": (rest, numbered), "rs": (rest,), "fc": (numbered,)}.get(kind, ())
    return (each for each in candidates if REQUEST_ID.fullmatch(each))


async def _output(api: Api, tenant: Tenant, request_id: str) -> Sequence[OutputItem] | None:
    """None: there is no such response, or it has not ended."""
    try:
        stored = await StoredResponse.find(api, tenant, ID_PREFIX + request_id)
        seen = await api.generation_service.status(request_id, tenant)
        return (await stored.whole()).output if seen.done is not None else None
    except NotFound:
        return None


def _as_input(item: OutputItem) -> InputItem:
    """As a client would send it back."""
    match item:
        case CallItem(call_id=call_id, name=name, arguments=arguments):
            return FunctionCallInput(
                type="function_call", call_id=call_id, name=name, arguments=arguments
            )
        case ReasoningItem():
            content = [
                InputReasoningText(type="reasoning_text", text=part.text) for part in item.content
            ]
            return ReasoningInput(type="reasoning", content=content)
        case OutputMessage():
            return InputMessage(role=item.role, content="".join(part.text for part in item.content))
