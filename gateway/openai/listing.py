"""Lists of what has an id, page by page, as OpenAI's clients ask for them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from msgspec import Struct
from starlette.datastructures import QueryParams

from gateway.http.exchange import Exchange
from gateway.openai.operation import parameter
from service_kit.errors import InvalidRequest

NUMBER: Final = re.compile(r"[0-9]{1,10}", re.ASCII)


class Named(Protocol):
    @property
    def id(self) -> str: ...


class Listing(Struct, kw_only=True):
    """`data` is of those who are one."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


def page_of(found: Sequence[Named], exchange: Exchange, *, most: int, default: int) -> Any:
    """The fields of a Listing, of what was found, the newest first."""
    query = QueryParams(exchange.scope["query_string"])
    limit = query.get("limit", str(default))
    if not NUMBER.fullmatch(limit) or not 1 <= int(limit) <= most:
        raise InvalidRequest("limit", f"must be in [1, {most}], got {limit[:64]!r}")
    items = list(found)
    if query.get("order", "desc") == "asc":
        items.reverse()
    if after := query.get("after", ""):
        places = [index for index, each in enumerate(items) if each.id == after]
        if not places:
            raise InvalidRequest("after", "must be the id of one that is in the list")
        items = items[places[0] + 1 :]
    shown = items[: int(limit)]
    first, last = (shown[0].id, shown[-1].id) if shown else (None, None)
    has_more = len(items) > len(shown)
    return {"data": shown, "first_id": first, "last_id": last, "has_more": has_more}


def listed(most: int, default: int) -> tuple[Mapping[str, Any], ...]:
    """The parameters that `page_of` reads."""
    return (
        parameter("query", "limit", "", f"1 to {most}, {default} if left out"),
        parameter("query", "order", "", "asc or desc, desc if left out"),
        parameter("query", "after", "", "id of the one before the first one wanted"),
    )
