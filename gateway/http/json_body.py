"""A JSON body: counted as it comes in, read once, and of its mistakes the first is told.

What a body may cost is bounded before anything is made of it. Reading holds everybody up, so what
it takes is counted part by part, as the network brings it: values, strings, lists and objects. Of
what is wrong only the first is looked for: a list of a million mistakes would cost a kilobyte each.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final, Self, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from service_kit.errors import InvalidRequest

# Reading takes about 60 ns per value, and a megabyte has room for half a million of them.
VALUES_MAX: Final = 1 << 18
# As many as 4096 messages of one part each have: an object costs a microsecond, a string half.
CONTAINERS_MAX: Final = 1 << 14
STRINGS_MAX: Final = 1 << 15
NOT_TAKEN: Final = "images, audio and files are not taken"
# What a field of several types may be: pydantic complains once per type.
UNIONS: Final = {
    "prompt": "must be a string, a list of strings, a list of token ids, or a list of those lists",
    "input": "must be a string or a list of messages with role and content, which is a string or a "
    f"list of text parts; {NOT_TAKEN}",
    "tool_choice": 'must be "none", "auto", "required" or an object: of type function, or of type '
    "allowed_tools, with a mode, auto or required, and tools, which are functions",
    "conversation": "must be the id of a conversation, or an object with nothing but its id",
    "stop": "must be a string or a list of strings",
    "content": f"must be a string or a list of text parts; {NOT_TAKEN}",
    "output": f"must be a string or a list of text parts; {NOT_TAKEN}",
}
# Those that are a text or a list of objects, of which it is told what is wrong in them.
LISTS: Final = frozenset({"input", "content", "output"})
WORDS: Final = {"missing": "is required", "model_type": "must be an object"}

BodyT = TypeVar("BodyT", bound=BaseModel)


class JsonBody:
    """One body. `feed` it, then `take` it. InvalidRequest at the first part that is one too many.

    `digest` is the identity of what was fed: the same bytes after the same `hashed` are the same.
    """

    def __init__(self, values_max: int = VALUES_MAX, hashed: bytes = b"") -> None:
        self._values_max = values_max
        self._raw = bytearray()
        self._hash = hashlib.sha256(hashed)
        self._is_in_string = False
        self._is_escaped = False
        self._commas = 0
        self._quotes = 0
        self._containers = 0

    @classmethod
    def of(cls, raw: bytes) -> Self:
        """A body that is all there."""
        body = cls()
        body.feed(raw)
        return body

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    def feed(self, part: bytes) -> None:
        """The next bytes, wherever they were cut."""
        if not part:
            return
        self._raw += part
        self._hash.update(part)
        self._count(part)
        if (
            self._commas >= self._values_max
            or self._quotes > 2 * STRINGS_MAX
            or self._containers > CONTAINERS_MAX
        ):
            self._raw = bytearray()
            raise InvalidRequest(
                "",
                f"the body must have at most {self._values_max} values, {STRINGS_MAX} strings and "
                f"{CONTAINERS_MAX} lists and objects",
            )

    def _count(self, part: bytes) -> None:
        """A prompt may be full of commas and brackets: look at what is outside of strings only."""
        # Escaped backslashes first: what still follows a backslash then is escaped by it.
        plain = part[self._is_escaped :].replace(b"\\\\", b"")
        self._is_escaped = plain.endswith(b"\\")
        plain = plain.replace(b'\\"', b"")
        pieces = plain.split(b'"', 2 * STRINGS_MAX + 1)
        outside = b"".join(pieces[self._is_in_string :: 2])
        self._quotes += len(pieces) - 1
        self._is_in_string ^= len(pieces) % 2 == 0
        self._commas += outside.count(b",")
        self._containers += outside.count(b"[") + outside.count(b"{")

    def take(self) -> dict[str, Any]:
        """The object that the bytes say, which are given up. InvalidRequest: they say none."""
        raw, self._raw = self._raw, bytearray()
        try:
            content = from_json(raw, allow_inf_nan=False, cache_strings="keys")
        except ValueError as error:
            raise InvalidRequest("", f"the body is not valid JSON: {cut(str(error))}") from None
        if not isinstance(content, dict):
            raise InvalidRequest("", "the body must be a JSON object")
        return content


def validated(kind: type[BodyT], content: Mapping[str, Any], context: object = None) -> BodyT:
    """The content as a model. InvalidRequest names the first field that is wrong.

    `context` is for the model's own validators.
    """
    try:
        return kind.model_validate(content, context=context)
    except ValidationError as error:
        raise _first_problem(error, content) from None


def _first_problem(error: ValidationError, content: Mapping[str, Any]) -> InvalidRequest:
    """One sentence. Of a union's many complaints the field and the choice of types is enough, or,
    of a list, what is wrong in it."""
    first, place = _told(error, content)
    for name in place:
        end = place.index(name) + 1
        is_union = name in UNIONS and len(first["loc"]) > end
        if is_union and (name not in LISTS or len(place) == end):
            return InvalidRequest(".".join(place[:end]), UNIONS[name])
    if first["type"] == "unknown":
        return InvalidRequest(".".join([*place, cut(first["ctx"]["key"])]), first["msg"])
    if first["type"] in WORDS:
        return InvalidRequest(".".join(place), WORDS[first["type"]])
    rule = first["msg"]
    if place[-1:] == ["type"] and not LISTS.isdisjoint(place[1:]):
        rule += f"; {NOT_TAKEN}"
    return InvalidRequest(".".join(place), rule[:1].lower() + rule[1:])


def _told(error: ValidationError, content: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The first complaint and its place, in which the names of a union's types are left out.

    Of a field that is a text or a list the deepest: the first is that it is no text.
    """
    found = error.errors(include_url=False, include_input=False)
    first = found[0]
    depth = next((at for at, part in enumerate(first["loc"], 1) if part in LISTS), 0)
    if depth:
        same = [each for each in found if each["loc"][:depth] == first["loc"][:depth]]
        first = max(same, key=lambda each: len(each["loc"]))
    place, value = list[str](), content
    for part in first["loc"]:
        if part in value if isinstance(value, Mapping) else isinstance(part, int):
            value = value[part]  # type: ignore[index]
            place.append(str(part))
    missing = [str(first["loc"][-1])] if first["type"] == "missing" else []
    return first, place + missing


def cut(text: str) -> str:
    return text if len(text) <= 200 else text[:199] + "…"
