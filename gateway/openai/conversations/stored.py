"""A conversation as the ledger has it.

A response is a part of it from the moment it is accepted, by its id: what it said is added by
whoever looks first once it has ended, so that no process must live for it.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

from gateway.openai.conversations.content import Content, Round
from gateway.openai.operation import Api
from gateway.openai.packing import unpacked
from gateway.openai.responses.reply import ID_PREFIX, Item, Response, message_id
from gateway.openai.responses.stored import StoredResponse
from gateway.openai.responses.turns import as_item, items_of_turns
from gateway.tenants import Tenant
from gateway.values.generation_request import Message
from ledger.batches.conversations import KeptConversation
from service_kit.errors import AlreadyExists, InvalidRequest, NotFound, Unavailable

CONVERSATION_ID: Final = re.compile(r"conv_[0-9a-f]{24}", re.ASCII)
# How often somebody else may be first.
TRIES_MAX: Final = 16
Edit = Callable[[Content], Content]


@dataclass(frozen=True, slots=True)
class StoredConversation:
    api: Api
    tenant: Tenant
    kept: KeptConversation
    content: Content

    @classmethod
    async def new(cls, api: Api, tenant: Tenant, id: str, content: Content) -> Self:
        """Or what has become of it, if it was made before."""
        raw = await content.packed(bounded="items")
        try:
            kept = await api.link.ledger.conversations.new(tenant.name, id, raw)
        except AlreadyExists:
            return await cls.find(api, tenant, id)
        return cls(api, tenant, kept, content)

    @classmethod
    async def find(
        cls, api: Api, tenant: Tenant, id: str, *, field: str = "id", over: Response | None = None
    ) -> Self:
        """With what a response has said that has ended since; `over` is known to have. NotFound."""
        check_id(id, field)
        for _ in range(TRIES_MAX):
            kept = await api.link.ledger.conversations.find(tenant.name, id)
            found = cls(api, tenant, kept, await unpacked(kept.content, Content))
            if (now := await found._looked_at(over)) is not None:
                return now
        raise Contended(id)

    @classmethod
    async def told(cls, api: Api, tenant: Tenant, id: str, over: Response) -> None:
        """It has what a response said that has ended. NotFound."""
        waits_for = await api.link.ledger.conversations.waits_for(tenant.name, id)
        # None: written by an earlier version.
        if waits_for is None or ID_PREFIX + waits_for == over.id:
            await cls.find(api, tenant, id, over=over)

    @classmethod
    async def changed(
        cls,
        api: Api,
        tenant: Tenant,
        id: str,
        edit: Edit,
        *,
        bounded: str = "",
        is_let_in: bool = False,
    ) -> Self:
        """As it is after the edit, whoever changes it at the same time. `is_let_in`: it takes
        something away.
        """
        for _ in range(TRIES_MAX):
            found = await cls.find(api, tenant, id)
            now = await found._with(edit(found.content), bounded, is_let_in=is_let_in)
            if now is not None:
                return now
        raise Contended(id)

    async def join(self, request_id: str, turns: Sequence[Message], num_before: int) -> None:
        """A response that was accepted goes on with it: nobody else did since it was found. The
        same response may have, by another gateway, or unheard. `num_before`: turns that it was
        asked before these, so that both are told by the same ids.
        """
        if self.content.has_round_of(request_id):
            return
        asked = items_of_turns(message_id(ID_PREFIX + request_id), turns, num_before)
        content = self.content.with_round(Round(asked, request_id, is_open=True))
        if await self._with(content, "conversation") is None:
            now = await self.find(self.api, self.tenant, self.kept.id)
            if not now.content.has_round_of(request_id):
                raise Contended(self.kept.id)

    async def _looked_at(self, over: Response | None) -> Self | None:
        """None: somebody else changed it at the same time."""
        if (waiting := self.content.open_round) is None:
            return self
        public = ID_PREFIX + waiting.request_id
        if over is None or over.id != public:
            try:
                over = await (await StoredResponse.find(self.api, self.tenant, public)).over()
            except NotFound:
                return await self._closed(None)
        if over is None:
            return self
        is_told = over.status in ("completed", "incomplete")
        said: list[Item] | None = [as_item(each) for each in over.output] if is_told else None
        return await self._closed(said)

    async def _closed(self, said: Sequence[Item] | None) -> Self | None:
        """There was room when it began, and it may leave the store once it is here. None as
        `_with`.
        """
        return await self._with(self.content.closed(said), is_let_in=True)

    async def _with(
        self, content: Content, bounded: str = "", *, is_let_in: bool = False
    ) -> Self | None:
        """None: it was changed since it was found."""
        raw, waiting = await content.packed(bounded=bounded), content.open_round
        kept = await self.api.link.ledger.conversations.change(
            self.tenant.name,
            self.kept,
            raw,
            waits_for="" if waiting is None else waiting.request_id,
            is_let_in=is_let_in,
        )
        return None if kept is None else replace(self, kept=kept, content=content)


class Contended(Unavailable):
    """Nothing was changed, as others were changing it."""

    def __init__(self, id: str) -> None:
        super().__init__(f"conversation {id!r} is being changed by others at the same time")


def check_id(id: str, field: str = "id") -> None:
    if not CONVERSATION_ID.fullmatch(id):
        raise InvalidRequest(field, f"must match {CONVERSATION_ID.pattern}")
