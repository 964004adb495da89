"""What is kept of a conversation: rounds of items, each added at once."""

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.openai.packing import compressed
from gateway.openai.responses.reply import Item
from service_kit.errors import InvalidRequest

# As many as a prompt has messages.
ITEMS_MAX: Final = 4096
CONTENT_BYTES_MAX: Final = 16 << 20
# Of so many items that were deleted it is remembered where they stood: as many as a page has.
PLACES_MAX: Final = 100


class Round(Struct, frozen=True, omit_defaults=True):
    """What a client added, or what a response was asked and, once it has ended, said."""

    items: Sequence[Item]
    # Of the response, without its prefix; "": there is none.
    request_id: str = ""
    # It had not ended when it was last looked at.
    is_open: bool = False


class Content(Struct, frozen=True, kw_only=True):
    metadata: dict[str, str]
    rounds: Sequence[Round] = ()
    # Of items that were deleted, the newest last: the one before each; "": it was the first.
    places: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def items(self) -> list[Item]:
        """Of an open round none: they are told once their answer is."""
        return [item for each in self.rounds if not each.is_open for item in each.items]

    @property
    def open_round(self) -> Round | None:
        """There is one at most."""
        return next((each for each in self.rounds if each.is_open), None)

    def has_round_of(self, request_id: str) -> bool:
        return bool(request_id) and any(each.request_id == request_id for each in self.rounds)

    def before(self, request_id: str) -> "Content":
        """What there was when that response began; all of it, if it is none of these."""
        if not self.has_round_of(request_id):
            return self
        end = next(i for i, each in enumerate(self.rounds) if each.request_id == request_id)
        return msgspec.structs.replace(self, rounds=self.rounds[:end])

    def with_round(self, added: Round) -> "Content":
        return msgspec.structs.replace(self, rounds=[*self.rounds, added])

    def closed(self, said: Sequence[Item] | None) -> "Content":
        """Of the open round, whose answer it is; None: it came to nothing."""

        def close(each: Round) -> Round:
            return Round([*each.items, *said], each.request_id) if said is not None else Round(())

        return self._each(lambda each: close(each) if each.is_open else each)

    def without(self, item_id: str) -> "Content":
        """Less one item, if it has it."""

        def cut(each: Round) -> Round:
            left = [item for item in each.items if item.id != item_id]
            return msgspec.structs.replace(each, items=left)

        ids = [item.id for item in self.items]
        if item_id not in ids:
            return self
        before = ["", *ids][ids.index(item_id)]
        places = {**dict([*self.places.items()][1 - PLACES_MAX :]), item_id: before}
        left = self._each(lambda each: each if each.is_open else cut(each))
        return msgspec.structs.replace(left, places=places)

    def num_before(self, item_id: str) -> int | None:
        """How many items stand before the place of one that was deleted. None: who knows."""
        there = {id: number for number, id in enumerate(["", *(item.id for item in self.items)])}
        # Whoever stood before it then may be gone by now, and was deleted later.
        while item_id not in there and item_id in self.places:
            item_id = self.places[item_id]
        return there.get(item_id)

    def _each(self, edit: Callable[[Round], Round]) -> "Content":
        """A round without items and without a response is none."""
        edited = [edit(each) for each in self.rounds]
        kept = [each for each in edited if each.items or each.request_id]
        return msgspec.structs.replace(self, rounds=kept)

    async def packed(self, *, bounded: str = "") -> bytes:
        """InvalidRequest: it would be too much; `bounded` is the field that adds to it."""
        raw = msgspec.msgpack.encode(self)
        if bounded and sum(len(each.items) for each in self.rounds) > ITEMS_MAX:
            raise InvalidRequest(bounded, _rule(f"{ITEMS_MAX} items"))
        if bounded and len(raw) > CONTENT_BYTES_MAX:
            raise InvalidRequest(bounded, _rule(f"{CONTENT_BYTES_MAX} bytes"))
        return await compressed(raw)


def _rule(limit: str) -> str:
    return f"would make the conversation longer than {limit}; delete some items, or begin another"
