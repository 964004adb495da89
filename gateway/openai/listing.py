"""Lists of what has an id, page by page, as OpenAI's clients ask for them."""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from msgspec import Struct
from starlette.datastructures import QueryParams

from gateway.http.exchange import HttpExchange
from gateway.openai.operation import parameter
from ledger.batches.shelf import Page
from service_kit.errors import InvalidRequest, NotFound

NUMBER: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
ORDERS: Final = ("asc", "desc")
NOT_LISTED: Final = "must be the id of one that is in the list"


class Named(Protocol):
    @property
    def id(self) -> str: ...


class Listing(Struct, kw_only=True):
    """`data` is of those who are one."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


def asked_page(exchange: HttpExchange, *, most: int, default: int) -> Page:
    """InvalidRequest: there is none of such a size."""
    query = QueryParams(exchange.scope["query_string"])
    limit = query.get("limit", str(default))
    if not NUMBER.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise InvalidRequest("limit", f"must be in [1, {most}], got {limit[:64]!r}")
    order = query.get("order", "desc")
    if order not in ORDERS:
        raise InvalidRequest("order", f"must be {' or '.join(ORDERS)}, got {order[:64]!r}")
    return Page(int(limit), query.get("after", ""), order == "asc")


async def ids_of_page(
    ids_of: Callable[[Page], Awaitable[tuple[list[str], bool]]], page: Page
) -> tuple[list[str], bool]:
    """Of what the ledger lists, and whether there are more."""
    try:
        return await ids_of(page)
    except NotFound:
        raise InvalidRequest("after", NOT_LISTED) from None


def told_page(shown: Sequence[Named], *, has_more: bool) -> Any:
    """The fields of a Listing."""
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    return {"data": shown, "first_id": first, "last_id": last, "has_more": has_more}


def page_of(
    found: Sequence[Named],
    exchange: HttpExchange,
    *,
    most: int,
    default: int,
    num_before: Callable[[str], int | None] = lambda _: None,
) -> Any:
    """The fields of a Listing, of what was found, the newest first. `num_before`: how many older
    ones there are than one that was deleted, for who turns pages and deletes what was on them.
    """
    limit, after, is_oldest_first = asked_page(exchange, most=most, default=default)
    items = list(reversed(found)) if is_oldest_first else list(found)
    if after:
        start = next((index + 1 for index, each in enumerate(items) if each.id == after), None)
        if start is None and (older := num_before(after)) is not None:
            start = older if is_oldest_first else len(items) - older
        if start is None:
            raise InvalidRequest("after", NOT_LISTED)
        items = items[start:]
    return told_page(items[:limit], has_more=len(items) > limit)


def listed(most: int, default: int) -> tuple[Mapping[str, Any], ...]:
    """The parameters that `asked_page` reads."""
    return (
        parameter("query", "limit", "", f"1 to {most}, {default} if left out"),
        parameter("query", "order", "|".join(ORDERS), "desc if left out"),
        parameter("query", "after", "", "id of the one before the first one wanted"),
    )
