"""Pieces of an output by their kind, as chunks of streams and whole answers have them. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gateway.text.tools.parser import CallArguments, CallBegins, Content, Piece, Reasoning


class Call(NamedTuple):
    """A call, or what a part of an output says of one: its first part alone has id and name."""

    number: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Flat(NamedTuple):
    """The order of text, reasoning and calls among each other is lost."""

    text: str
    reasoning: str
    calls: Sequence[Call]


def flat(pieces: Sequence[Piece]) -> Flat:
    calls: list[Call] = []
    for piece in pieces:
        if isinstance(piece, CallBegins):
            calls.append(Call(piece.call, piece.id, piece.name))
        elif isinstance(piece, CallArguments):
            calls.append(Call(piece.call, arguments=piece.fragment))
    return Flat(
        "".join([piece.text for piece in pieces if isinstance(piece, Content)]),
        "".join([piece.text for piece in pieces if isinstance(piece, Reasoning)]),
        joined(calls),
    )


def joined(calls: Sequence[Call]) -> Sequence[Call]:
    """One for each of them."""
    if len(calls) < 2:
        return calls
    by_number: dict[int, list[Call]] = {}
    for call in calls:
        by_number.setdefault(call.number, []).append(call)
    return [some[0]._replace(arguments=_arguments(some)) for some in by_number.values()]


def _arguments(parts: Iterable[Call]) -> str:
    return "".join([part.arguments for part in parts])
