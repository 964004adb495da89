"""What the bodies of all endpoints share: strict types, and the names of what is wrong.

Types are strict (a string is no number) but ranges are left to `validation`, which both protocols
share. A key nobody knows is refused as OpenAI does it (a misspelt `max_token` must not be ignored),
or, where the operator says so, left out with a word to whoever sent it. With null it says nothing
and is taken anywhere: SDKs write every field that their types have.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Annotated, Any, ClassVar, Final, TypeVar, get_args

import structlog
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from gateway.http.json_body import JsonBody, validated
from gateway.requests.validation import TooMany
from service_kit.errors import InvalidRequest

log = structlog.get_logger()

# Sent by clients for OpenAI's own bookkeeping, or of other servers' engines; they change no output.
HARMLESS: Final = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "spaces_between_special_tokens",
        "user",
    }
)
# A wish, which models here have no word for.
VERBOSITIES: Final = (None, "low", "medium", "high")
# Known to OpenAI's API or to other servers, not to this one: accepted only with a value that asks
# for nothing.
NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "add_special_tokens": (None, False),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "cache_salt": (None,),
    "chat_template": (None,),
    "conversation": (None,),
    "detokenize": (None, True),
    "documents": (None, []),
    "early_stopping": (None, False),
    "echo": (None, False),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_whitespace_pattern": (None,),
    "include_reasoning": (None, True),
    "length_penalty": (None, 1, 1.0),
    "logits_processors": (None, []),
    "max_tool_calls": (None,),
    "modalities": (None, ["text"]),
    "no_stop_trim": (None, False),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_embeds": (None,),
    "request_id": (None,),
    "rid": (None,),
    "separate_reasoning": (None, True),
    "store": (None, False),
    "stream_reasoning": (None, True),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": VERBOSITIES,
    "web_search_options": (None,),
}
UNSUPPORTED: Final = "is not supported by this server"
NAMING: Final = (
    "is a header here: Idempotency-Key names the request (the same again is the same request), "
    "x-request-id the answer"
)
# Where there is what such a field asks for, or why there is none.
ELSEWHERE: Final = {
    "add_special_tokens": "is for texts: a chat template writes the special tokens itself",
    "bad_words": f"{UNSUPPORTED}; bad_words_token_ids takes them as POST /tokenize tells them",
    "best_of": "must be 1 here; ask for n, and choose yourself",
    "cache_salt": f"{UNSUPPORTED}; prefixes are shared by nobody but the requests of a tenant",
    "chat_template": f"{UNSUPPORTED}; it is that of the model's folder",
    "conversation": "is not for chats and completions: POST /v1/responses goes on with one",
    "echo": "is for completions",
    "function_call": f"{UNSUPPORTED}; chat has tool_choice for it",
    "functions": f"{UNSUPPORTED}; chat has tools for them",
    "guided_whitespace_pattern": f"{UNSUPPORTED}; structured_outputs has disable_any_whitespace",
    "include_reasoning": "must be true: reasoning is told, apart from the text",
    "max_tool_calls": "counts calls of OpenAI's own tools, which are not here; "
    "parallel_tool_calls: false is for one call at most",
    "no_stop_trim": f"{UNSUPPORTED}; include_stop_str_in_output is the same",
    "request_id": NAMING,
    "rid": NAMING,
    "separate_reasoning": "must be true: reasoning is told apart from the text",
    "store": "is not for chats and completions: only POST /v1/responses keeps what it answers",
    "tool_choice": "is for chats: POST /v1/chat/completions and /v1/responses",
    "tools": "is for chats: POST /v1/chat/completions and /v1/responses",
    "stream_reasoning": "must be true: it comes as it is said",
    "verbosity": "must be low, medium or high",
    "truncate_prompt_tokens": f"{UNSUPPORTED}: a prompt is computed whole, or refused as too long",
}
# OpenAI's bounds of what it keeps for its client.
METADATA_MAX: Final = 16
METADATA_KEY_CHARS_MAX: Final = 64
METADATA_VALUE_CHARS_MAX: Final = 512
# More entries than any object of ours may have: pydantic tells each wrong one.
ENTRIES_MAX: Final = 1024
IGNORED_HEADER: Final = "x-ignored-fields"
# What can stand in a header, and how many of them.
NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NAMES_MAX: Final = 16
# Names in the log, each once: clients may make up new ones for ever.
LOGGED_MAX: Final = 256


def _few(value: object, info: ValidationInfo) -> object:
    if isinstance(value, dict) and len(value) > ENTRIES_MAX:
        raise TooMany(str(info.field_name), ENTRIES_MAX, len(value), "entries")
    return value


# Of a list or an object with a million mistakes the first is enough.
FAIL_FAST: Final = Field(fail_fast=True)
Texts = Annotated[list[str], FAIL_FAST]
Ids = Annotated[list[int], FAIL_FAST]
IdLists = Annotated[list[Ids], FAIL_FAST]
Options = Annotated[dict[str, bool | int | str | None], BeforeValidator(_few)]
Biases = Annotated[dict[str, float], BeforeValidator(_few)]


class RequestBody(BaseModel):
    # What its bytes are hashed after: two endpoints may read the same ones in two ways.
    identity: ClassVar[bytes] = b""
    # What others call a field, and what it is here.
    hints: ClassVar[Mapping[str, str]] = {}
    # Docstrings of fields are their descriptions in the OpenAPI document.
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _known(cls, content: object, info: ValidationInfo) -> object:
        """The first key that nobody knows: left to itself pydantic tells them all.

        Those that are null, and with a place to note them all, are left out; so are those of an
        object of another `type`, of which that is told.
        """
        if not isinstance(content, dict) or content.keys() <= (known := _names(cls)):
            return content
        unknown = [key for key in content if key not in known and content[key] is not None]
        if unknown and info.context is None and not _is_another(cls, content):
            hint = "".join(f"; {cls.hints[key]}" for key in unknown[:1] if key in cls.hints)
            raise PydanticCustomError(
                "unknown", "is not a known field{hint}", {"key": unknown[0], "hint": hint}
            )
        noted = {} if info.context is None else info.context
        for key in unknown:
            if len(noted) < NAMES_MAX:
                noted[key if NAME.fullmatch(key) else "?"] = None
        return {key: value for key, value in content.items() if key in known}

    @property
    def aliases(self) -> Mapping[str, str]:
        """What this body calls fields of a request, where most bodies call them otherwise."""
        return {}

    @contextmanager
    def aliased(self) -> Iterator[None]:
        """Complaints about a request name the fields of the body that it was made of."""
        try:
            yield
        except InvalidRequest as error:
            for each in (error, *error.violations):
                each.field = self.named(each.field)
            raise

    def named(self, field: str) -> str:
        """What this body calls a field of a request."""
        return self.aliases.get(field, field)


@cache
def _names(body: type[RequestBody]) -> frozenset[str]:
    """What its fields are called in JSON."""
    return frozenset(each.alias or name for name, each in body.model_fields.items())


def _is_another(body: type[RequestBody], content: Mapping[str, Any]) -> bool:
    """Whether it says to be of a `type` that this body is not."""
    kind = body.model_fields.get("type")
    types = () if kind is None else get_args(kind.annotation)
    return bool(types) and "type" in content and content["type"] not in types


BodyT = TypeVar("BodyT", bound=RequestBody)


class BodyParser:
    """Makes models of bodies. One per gateway."""

    def __init__(self, *, refuses_unknown: bool) -> None:
        self._refuses_unknown = refuses_unknown
        self._logged: set[str] = set()

    def parse(self, kind: type[BodyT], sent: JsonBody) -> tuple[BodyT, dict[str, str]]:
        """The model, and the headers that tell the client which fields were left out."""
        ignored: dict[str, None] | None = None if self._refuses_unknown else {}
        body = parse(kind, sent, ignored)
        if not ignored:
            return body, {}
        for name in ignored:
            if name not in self._logged and len(self._logged) < LOGGED_MAX:
                self._logged.add(name)
                log.warning("http.field_ignored", field=name)
        return body, {IGNORED_HEADER: ", ".join(ignored)}


def parse(kind: type[BodyT], sent: JsonBody, ignored: dict[str, None] | None = None) -> BodyT:
    """A request body, whose bytes are given up. InvalidRequest names the first wrong field.

    `ignored` notes those that nobody knows; None: the first of them is wrong.
    """
    kept: dict[str, Any] = {}
    for key, value in sent.take().items():
        if key in kind.model_fields:
            kept[key] = value
        elif key in NEUTRAL:
            # By type too: Python has 1 == True, JSON has not.
            if not any(type(value) is type(each) and value == each for each in NEUTRAL[key]):
                raise InvalidRequest(key, ELSEWHERE.get(key, UNSUPPORTED))
        elif key not in HARMLESS:
            kept[key] = value
    return validated(kind, kept, ignored)


def json_of(value: Mapping[str, Any], field: str) -> str:
    """An object of a body, as JSON. InvalidRequest: it has a number that none can hold."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise InvalidRequest(field, "must have no number beyond 1.8e308") from None


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """InvalidRequest: too much of it."""
    found = metadata or {}
    if len(found) > METADATA_MAX:
        rule = f"must have at most {METADATA_MAX} entries, got {len(found)}"
        raise InvalidRequest("metadata", rule)
    if any(
        len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX
        for key, value in found.items()
    ):
        rule = (
            f"must have keys of at most {METADATA_KEY_CHARS_MAX} characters and values of at most "
            f"{METADATA_VALUE_CHARS_MAX}"
        )
        raise InvalidRequest("metadata", rule)
