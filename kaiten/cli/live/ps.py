"""`kaiten ps`: requests that live, as one look shows them."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from kaiten.cli.complaint import complain
from kaiten.cli.live.cell_view import Choice, age, choices
from kaiten.cli.live.reasons import trouble
from kaiten.cli.live.watch import Watching
from kaiten.client.errors import ApiError
from kaiten.client.live_core import LiveCore
from kaiten.tls import TLS

COLUMNS: Final = ("REQUEST", "TENANT", "STATE", "TOKENS", "OF", "AGE", "WHERE, OR WHY IT WAITS")


def ps(gateways: Sequence[tuple[str, TLS | None]], *, api_key: str | None, as_json: bool) -> int:
    """Print one look; the exit code."""
    core = LiveCore()
    try:
        core.take(next(iter(Watching(gateways, api_key, 0))))
    except ApiError as error:
        return complain(error, ", ".join(address for address, _ in gateways))
    lines = map(_json, choices(core)) if as_json else lines_of(core)
    sys.stdout.writelines(line + "\n" for line in lines)
    if as_json and (rest := unseen(core)):
        sys.stderr.write(f"{rest}\n")
    return 0


def lines_of(core: LiveCore) -> Iterator[str]:
    """A heading, a line for each choice of each request, how many are not shown, and why nobody
    who comes now is computed.
    """
    shown = list(choices(core))
    table = [COLUMNS, *map(_cells, shown)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        yield "  ".join(map(str.ljust, cells, widths)).rstrip()
    if rest := unseen(core):
        yield rest
    if why := trouble(core):
        yield why


def unseen(core: LiveCore) -> str:
    """Of a long queue only the beginning is told; empty: all of it."""
    more = core.waiting - len(core.queue)
    return f"and {more} more that wait" if more else ""


def _cells(one: Choice) -> tuple[str, ...]:
    where = f"{one.worker} slot {one.slot}" if one.state == "running" else one.why or one.worker
    return (
        one.name,
        one.tenant,
        one.state,
        str(one.tokens),
        str(one.tokens_max),
        age(one.age_s),
        where,
    )


def _json(one: Choice) -> str:
    return json.dumps(one._asdict())
