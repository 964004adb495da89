"""What a tenant keeps, files, batches and conversations: one bound of their bytes, and lists."""

from typing import Final, NamedTuple

from ledger import scripts
from ledger.store import Store
from service_kit.errors import NotFound, Overloaded

# Which of its keys, as shelf.lua counts them.
FILES: Final = 2
BATCHES: Final = 3


class Page(NamedTuple):
    """Of a list by when it was made: so many, behind the one with this id, if there is one."""

    limit: int
    after: str = ""
    is_oldest_first: bool = False


async def page_of(
    store: Store, tenant: str, which: int, page: Page, *, of: str = "all"
) -> tuple[list[str], bool]:
    """Ids, and whether there are more; `of` whom, as shelf_page.lua tells them apart. Behind one
    that has left just now, too: who turns pages may delete what was on them.

    NotFound: `after` is not in the list.
    """
    place = (store.keys.place(tenant, page.after),) if page.after else ()
    verdict, *found = await store.script(
        scripts.SHELF_PAGE,
        (*store.keys.shelf(tenant), *place),
        (which, int(page.is_oldest_first), page.after, page.limit, of),
    )
    if verdict == b"NONE":
        raise NotFound(f"{page.after!r}")
    ids = [id.decode() for id in found]
    return ids[: page.limit], len(ids) > page.limit


def too_many_bytes(tenant: str, limit: int, live: int) -> Overloaded:
    return Overloaded(
        f"too many bytes of files, batches and conversations of tenant {tenant} are kept;"
        " delete some",
        60.0,
        limit,
        live=live,
        subject="tenant",
        rule="files_mb",
        tenant=tenant,
    )
