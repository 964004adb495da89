"""What responses say gets into their conversations, though nobody asks after either.

Whoever hears of a response's end, or looks at its conversation, sees to that at once. What nobody
looks at is found here before it leaves the ledger, by all gateways: the first one changes it.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog

from gateway.openai.conversations.stored import Contended, StoredConversation
from gateway.openai.operation import Api
from gateway.tenants import Keyring
from ledger.batches.conversations import Waiting
from service_kit.errors import KaitenError, NotFound, Unavailable

log = structlog.get_logger()

# Much less than a response is kept where room runs short.
LOOK_S: Final = 5.0


class ConversationKeeper:
    """One per gateway."""

    def __init__(self, api: Api, keyring: Keyring) -> None:
        self._api = api
        self._keyring = keyring

    async def run(self) -> None:
        """For as long as the gateway lives."""
        while True:
            # What is wrong with the store, readiness says.
            with suppress(KaitenError):
                for each in await self._over():
                    await self._close(each)
            await asyncio.sleep(LOOK_S)

    async def _over(self) -> Sequence[Waiting]:
        """Those whose response has ended, or is not there."""
        ledger = self._api.link.ledger
        waiting = await ledger.conversations.waiting()
        live = await ledger.live([f"{each.tenant}:{each.request_id}" for each in waiting])
        return [each for each, is_live in zip(waiting, live, strict=True) if not is_live]

    async def _close(self, each: Waiting) -> None:
        try:
            await StoredConversation.find(self._api, self._keyring.named(each.tenant), each.id)
        except NotFound:
            await self._api.link.ledger.conversations.let_go(each.tenant, each.id)
        except Contended:
            # Whoever changes it looks at it.
            pass
        except Unavailable:
            raise
        except Exception as error:
            # Of this one; those behind it are looked at all the same.
            log.error("conversation.crashed", conversation=each.id, exc_info=error)
