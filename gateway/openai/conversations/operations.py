"""/v1/conversations: what was said, kept under one name that responses go on with."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, ClassVar, Final, Literal, get_args

from msgspec import Struct
from msgspec.structs import replace
from pydantic import Field

from gateway.http.exchange import HttpExchange, gone_already
from gateway.http.json_body import cut
from gateway.openai.conversations.content import Content, Round
from gateway.openai.conversations.stored import (
    CONVERSATION_ID,
    Edit,
    StoredConversation,
    check_id,
)
from gateway.openai.listing import listed, page_of, told_page
from gateway.openai.operation import LOOKS, READS, Api, Operation, named, parameter
from gateway.openai.request_body import FAIL_FAST, RequestBody, check_metadata
from gateway.openai.responses.body import WholeItem
from gateway.openai.responses.included import INCLUDING, NOT_OF_ITEMS, check_included
from gateway.openai.responses.reply import InputItems, Item
from gateway.openai.responses.turns import items_of_turns
from gateway.openai.usage import Count
from gateway.values.generation_request import ChatPrompt, Message
from service_kit.errors import NotFound

# OpenAI's own.
ITEMS_ADDED_MAX: Final = 20
ITEMS: Final = 20
ITEMS_LISTED_MAX: Final = 100
Items = Annotated[list[WholeItem], FAIL_FAST, Field(max_length=ITEMS_ADDED_MAX)]


class Conversation(Struct, kw_only=True):
    id: str
    object: Literal["conversation"] = "conversation"
    created_at: Count
    metadata: dict[str, str]


class DeletedConversation(Struct, kw_only=True):
    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: bool = True


class _BodyWithItems(RequestBody):
    items: Items | None

    @property
    def aliases(self) -> Mapping[str, str]:
        return {ChatPrompt.field: "items"}

    def added(self, api: Api, exchange: HttpExchange) -> Sequence[Item]:
        """InvalidRequest: nobody could ever go on with them."""
        turns: list[Message] = []
        for index, item in enumerate(self.items or ()):
            item.added_to(turns, f"items.{index}")
        if turns:
            with self.aliased():
                api.generation_service.check_turns(ChatPrompt(messages=tuple(turns)))
        return items_of_turns(f"msg_{exchange.new_id(of_body=True)}", turns)


class ConversationBody(_BodyWithItems):
    """POST /v1/conversations."""

    identity: ClassVar[bytes] = b"conversation"

    items: Items | None = None
    """As those of a response's `input`, at most 20, but for references."""
    metadata: dict[str, str] | None = None
    """Yours: told again with the conversation. At most 16 of 64 and 512 characters."""


class MetadataBody(RequestBody):
    """POST /v1/conversations/{id}."""

    metadata: dict[str, str] | None
    """In place of what it had."""


class ItemsBody(_BodyWithItems):
    """POST /v1/conversations/{id}/items."""

    identity: ClassVar[bytes] = b"items"

    items: Items
    """As those of a response's `input`, at most 20, but for references."""


async def create_conversation(api: Api, exchange: HttpExchange, body: ConversationBody) -> None:
    check_metadata(body.metadata)
    items = body.added(api, exchange)
    content = Content(metadata=body.metadata or {}, rounds=[Round(items)] if items else [])
    id = f"conv_{exchange.new_id(of_body=True)}"
    found = await StoredConversation.new(api, exchange.tenant, id, content)
    await exchange.send_json(200, told(found))


async def get_conversation(api: Api, exchange: HttpExchange, _body: None) -> None:
    await exchange.send_json(200, told(await _found(api, exchange)))


async def update_conversation(api: Api, exchange: HttpExchange, body: MetadataBody) -> None:
    check_metadata(body.metadata)

    def edit(content: Content) -> Content:
        return replace(content, metadata=body.metadata or {})

    await exchange.send_json(200, told(await _changed(api, exchange, edit)))


async def delete_conversation(api: Api, exchange: HttpExchange, _body: None) -> None:
    """What is under way in it goes on, and is found by its own id."""
    id, tenant = exchange.path["id"], exchange.tenant.name
    conversations = api.link.ledger.conversations
    check_id(id)
    with gone_already(exchange):
        await conversations.waits_for(tenant, id)
        # Not found: it was there just now.
        with suppress(NotFound):
            await conversations.drop(tenant, id)
    await exchange.send_json(200, DeletedConversation(id=id))


async def add_items(api: Api, exchange: HttpExchange, body: ItemsBody) -> None:
    check_included(exchange, no_logprobs=NOT_OF_ITEMS)
    items = body.added(api, exchange)

    def edit(content: Content) -> Content:
        # Its own change may have been made, unheard, before another's, and be deleted by now.
        known = {*(each.id for each in content.items), *content.places}
        new = [each for each in items if each.id not in known]
        return content.with_round(Round(new)) if new else content

    await _changed(api, exchange, edit, bounded="items")
    await exchange.send_json(200, InputItems(**told_page(items, has_more=False)))


async def list_items(api: Api, exchange: HttpExchange, _body: None) -> None:
    """The newest first, as all lists are."""
    check_included(exchange, no_logprobs=NOT_OF_ITEMS)
    content = (await _found(api, exchange)).content
    items, num_before = content.items[::-1], content.num_before
    page = page_of(items, exchange, most=ITEMS_LISTED_MAX, default=ITEMS, num_before=num_before)
    reply = InputItems(**page)
    await exchange.send_json(200, reply)


async def get_item(api: Api, exchange: HttpExchange, _body: None) -> None:
    check_included(exchange, no_logprobs=NOT_OF_ITEMS)
    found = await _found(api, exchange)
    await exchange.send_json(200, _item_of(found.content, exchange))


async def delete_item(api: Api, exchange: HttpExchange, _body: None) -> None:
    """The conversation without it."""
    was_there = False

    def edit(content: Content) -> Content:
        nonlocal was_there
        # Not there again: somebody else was as fast, or the store not heard.
        if not was_there:
            with gone_already(exchange):
                _item_of(content, exchange)
        was_there = True
        return content.without(exchange.path["item_id"])

    await exchange.send_json(200, told(await _changed(api, exchange, edit, is_let_in=True)))


def told(found: StoredConversation) -> Conversation:
    kept = found.kept
    return Conversation(id=kept.id, created_at=kept.created_at, metadata=found.content.metadata)


async def _found(api: Api, exchange: HttpExchange) -> StoredConversation:
    return await StoredConversation.find(api, exchange.tenant, exchange.path["id"])


async def _changed(
    api: Api, exchange: HttpExchange, edit: Edit, *, bounded: str = "", is_let_in: bool = False
) -> StoredConversation:
    return await StoredConversation.changed(
        api, exchange.tenant, exchange.path["id"], edit, bounded=bounded, is_let_in=is_let_in
    )


def _item_of(content: Content, exchange: HttpExchange) -> Item:
    id = exchange.path["item_id"]
    found = next((each for each in content.items if each.id == id), None)
    if found is None:
        raise NotFound(f"item {cut(repr(id))}", f"{exchange.path['id']!r} has none of that name")
    return found


ALL: Final = "/v1/conversations"
PATH: Final = f"{ALL}/{{id}}"
ITEMS_PATH: Final = f"{PATH}/items"
ITEM_PATH: Final = f"{ITEMS_PATH}/{{item_id}}"
ID: Final = (parameter("path", "id", CONVERSATION_ID.pattern, "as its answer has it"),)
ITEM: Final = (*ID, parameter("path", "item_id", "", "as lists of items have it"))
LISTED: Final = (*ID, INCLUDING, *listed(ITEMS_LISTED_MAX, ITEMS))
NAMED: Final = named("conversation")
NAMED_ITEMS: Final = named("items, added once")
WHOLE: Final = (Conversation,)
SOME: Final = (InputItems,)
OPERATIONS: Final = (
    Operation(
        "POST",
        ALL,
        "createConversation",
        create_conversation,
        READS,
        WHOLE,
        (NAMED,),
        ConversationBody,
    ),
    Operation("GET", PATH, "getConversation", get_conversation, LOOKS, WHOLE, ID),
    Operation(
        "POST", PATH, "updateConversation", update_conversation, READS, WHOLE, ID, MetadataBody
    ),
    Operation(
        "DELETE",
        PATH,
        "deleteConversation",
        delete_conversation,
        LOOKS,
        (DeletedConversation,),
        ID,
    ),
    Operation(
        "POST",
        ITEMS_PATH,
        "addItems",
        add_items,
        READS,
        SOME,
        (*ID, NAMED_ITEMS, INCLUDING),
        ItemsBody,
    ),
    Operation("GET", ITEMS_PATH, "listItems", list_items, LOOKS, SOME, LISTED),
    Operation("GET", ITEM_PATH, "getItem", get_item, LOOKS, get_args(Item), (*ITEM, INCLUDING)),
    Operation("DELETE", ITEM_PATH, "deleteItem", delete_item, LOOKS, WHOLE, ITEM),
)
