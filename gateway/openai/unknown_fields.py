"""Fields of a body that nobody knows: refused, or left out with a word to whoever sent them."""

import re
from collections.abc import Iterator
from typing import Final

import structlog

log = structlog.get_logger()

HEADER: Final = "x-ignored-fields"
# What can stand in a header, and how many of them.
NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAMES_MAX: Final = 16
# Names in the log, each once: clients may make up new ones for ever.
LOGGED_MAX: Final = 256


class Ignored:
    """Those of one body."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def add(self, name: str) -> None:
        if len(self._names) < NAMES_MAX:
            self._names[name if NAME.fullmatch(name) else "?"] = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    @property
    def headers(self) -> dict[str, str]:
        """For the answer; empty when all was known."""
        return {HEADER: ", ".join(self._names)} if self._names else {}


class UnknownFields:
    """What a gateway does with them. One per gateway."""

    def __init__(self, *, are_refused: bool) -> None:
        self.are_refused = are_refused
        self._logged: set[str] = set()

    def of_a_body(self) -> Ignored | None:
        """Where those of the next body are noted; None: the first one is refused."""
        return None if self.are_refused else Ignored()

    def told(self, ignored: Ignored | None) -> dict[str, str]:
        """The headers that tell the client; the log has each name once."""
        if ignored is None:
            return {}
        for name in ignored:
            if name not in self._logged and len(self._logged) < LOGGED_MAX:
                self._logged.add(name)
                log.warning("http.field_ignored", field=name)
        return ignored.headers
