"""Judge what a request says of tools: those to be called, and the calls of earlier turns. Pure."""

import json
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final

from pydantic_core import from_json

from gateway.requests import structured_outputs
from gateway.requests.reading import is_held
from gateway.requests.validation import Limits, TooMany
from gateway.text.model_card import ModelCard
from gateway.values.generation_request import ChatPrompt, GenerationRequest, Tool
from kaiten.v1.common_pb2 import FEATURE_STRUCTURED_OUTPUTS, StructuredOutputs
from service_kit.errors import InvalidRequest

PREFIX: Final = "conversation"
TOOLS_MAX: Final = 128
TOOL_NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
# Of JSON inside of texts, all of it together: it is read beside the other requests, and a value
# takes as long as one of a body. What stands in its strings counts, too.
MARKS: Final = ",[{"
MARKS_MAX: Final = 1 << 18
BEYOND: Final = "must have no number beyond 1.8e308"


def check(request: GenerationRequest) -> None:
    """InvalidRequest names the first field that is wrong."""
    if isinstance(request.prompt, ChatPrompt):
        check_chat(request.prompt)


def check_chat(prompt: ChatPrompt) -> None:
    """As `check`, of what is to be said."""
    _check_size(prompt)
    _check_tools(prompt.tools)
    for index, message in enumerate(prompt.messages):
        for number, call in enumerate(message.tool_calls):
            field = call.place or f"{prompt.place(index)}.tool_calls.{number}"
            _check_name(f"{field}.name", call.name)
            _object(f"{field}.arguments", call.arguments)


def check_model(request: GenerationRequest, card: ModelCard, limits: Limits) -> None:
    """InvalidRequest: the model cannot be told of that, or nobody would understand its answer."""
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt):
        return
    if prompt.tools and not card.knows_tools:
        raise InvalidRequest("conversation.tools", "this model's chat template knows no tools")
    if prompt.tools and request.is_read and card.tool_format is None:
        rule = "how this model writes calls is not known; the gateway's --tool-format may say it"
        raise InvalidRequest("conversation.tools", rule)
    if is_held(request):
        _check_held(request, prompt, card, limits)
    for index, message in enumerate(prompt.messages):
        if card.knows_tools and message.role == "tool" and not message.tool_call_id:
            raise InvalidRequest(f"{prompt.place(index)}.tool_call_id", "must be given")


def _check_held(
    request: GenerationRequest, prompt: ChatPrompt, card: ModelCard, limits: Limits
) -> None:
    """Their grammar must be one that somebody can keep to, beside all else that was asked."""
    wanted, field = request.sampling.structured_outputs, f"{PREFIX}.tool_choice"
    has_own = request.sampling.HasField("structured_outputs")
    if not (request.must_call or request.may_call or has_own):
        index = next(index for index, tool in enumerate(prompt.tools) if tool.is_strict)
        field = f"{PREFIX}.tools.{index}.strict"
    if FEATURE_STRUCTURED_OUTPUTS not in limits.features:
        raise InvalidRequest(field, "no worker of this cell can keep to a grammar")
    if not request.must_call:
        _check_answer(wanted, card)
    for name in structured_outputs.EXCLUDED:
        if getattr(request.sampling, name):
            rule = f"must not be set: with {field.rpartition('.')[2]} the output ends by a grammar"
            raise InvalidRequest(f"sampling.{name}", rule)


def _check_answer(wanted: StructuredOutputs, card: ModelCard) -> None:
    """What else than calls the output may be."""
    form = wanted.WhichOneof("constraint")
    if form == "grammar":
        rule = "must be no grammar beside tools; give tool_choice none, or another form"
        raise InvalidRequest(structured_outputs.FIELD, rule)
    if form is not None and card.tool_format is not None and card.tool_format.is_bare:
        rule = (
            "must not stand beside tools: this model's calls have no marks; give tool_choice none"
        )
        raise InvalidRequest(structured_outputs.FIELD, rule)
    if form == "json":
        _json(structured_outputs.FIELD, wanted.json)


def _check_size(prompt: ChatPrompt) -> None:
    calls = (call.arguments for message in prompt.messages for call in message.tool_calls)
    schemas = (tool.parameters for tool in prompt.tools)
    count = sum(text.count(mark) for text in chain(calls, schemas) for mark in MARKS)
    if count > MARKS_MAX:
        raise TooMany(prompt.field, MARKS_MAX, count, "values in tools and calls")


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > TOOLS_MAX:
        raise TooMany("conversation.tools", TOOLS_MAX, len(tools), "tools")
    names: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"conversation.tools.{index}"
        _check_name(f"{field}.name", tool.name)
        if tool.name in names:
            raise InvalidRequest(f"{field}.name", f"must differ from the others, got {tool.name!r}")
        names.add(tool.name)
        schema = _object(f"{field}.parameters", tool.parameters)
        if schema.get("type", "object") != "object":
            raise InvalidRequest(f"{field}.parameters", "must be the JSON Schema of an object")


def _check_name(field: str, name: str) -> None:
    if not TOOL_NAME.fullmatch(name):
        raise InvalidRequest(field, f"must match {TOOL_NAME.pattern}, got {name[:64]!r}")


def _json(field: str, text: str) -> object:
    try:
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(field, f"must be JSON: {str(error)[:200]}") from None
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        raise InvalidRequest(field, BEYOND) from None
    return value


def is_object(text: str) -> bool:
    """Whether a call with these arguments could stand in a conversation."""
    try:
        _object("", text)
    except InvalidRequest:
        return False
    return True


def _object(field: str, text: str) -> dict[str, Any]:
    value = _json(field, text)
    if not isinstance(value, dict):
        raise InvalidRequest(field, "must be a JSON object")
    return value
