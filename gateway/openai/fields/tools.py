"""Tools as OpenAI has them: what bodies say of them, and how answers tell calls."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple, Protocol

from msgspec import UNSET, Struct, UnsetType

from gateway.openai.request_body import FAIL_FAST, RequestBody, json_of
from gateway.openai.usage import Count
from gateway.values.generation_request import (
    NO_PARAMETERS,
    GenerationRequest,
    Tool,
    ToolCall,
)
from service_kit.errors import InvalidRequest


class Described(Protocol):
    """A function as either endpoint describes it."""

    @property
    def name(self) -> str: ...
    @property
    def description(self) -> str | None: ...
    @property
    def parameters(self) -> dict[str, Any] | None: ...
    @property
    def strict(self) -> bool | None: ...


class FunctionBody(RequestBody):
    name: str
    """1 to 64 of a-z, A-Z, 0-9, _ and -; no two alike."""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of an object. Left out: no parameters."""
    strict: bool | None = None
    """true: its arguments keep to the schema whenever it is called, for which workers must be able
    to keep to a grammar. Else they do where a call is forced, by tool_choice."""


class ToolBody(RequestBody):
    type: Literal["function"]
    function: FunctionBody


class NamedFunction(RequestBody):
    name: str


class NamedChoice(RequestBody):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(RequestBody):
    name: str
    arguments: str
    """A JSON object, as JSON."""
    parsed_arguments: Any = None
    """What the SDKs' `parse` made of the arguments."""


class ToolCallBody(RequestBody):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Its number in a stream, which SDKs leave in what they put together."""

    def call(self) -> ToolCall:
        return ToolCall(id=self.id, name=self.function.name, arguments=self.function.arguments)


Tools = Annotated[list[ToolBody], FAIL_FAST]


class AllowedTools(RequestBody):
    mode: Literal["auto", "required"]
    """required: a call must be made."""
    tools: Tools
    """By their names; what else is said of them is not looked at."""


class AllowedChoice(RequestBody):
    """The model is told of all tools, and calls none but these: workers must be able to keep to a
    grammar."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolCalls = Annotated[list[ToolCallBody], FAIL_FAST]
Choice = Literal["none", "auto", "required"]


def tools_of(given: Iterable[Described]) -> tuple[Tool, ...]:
    return tuple(_tool(each, index) for index, each in enumerate(given))


def _tool(given: Described, index: int) -> Tool:
    parameters = NO_PARAMETERS
    if given.parameters is not None:
        parameters = json_of(given.parameters, f"conversation.tools.{index}.parameters")
    return Tool(
        name=given.name,
        description=given.description or "",
        parameters=parameters,
        is_strict=given.strict is True,
    )


class Chosen(NamedTuple):
    """What tool_choice says. `names`: of the only tools it is about, which stand in `field`."""

    mode: Choice
    names: Sequence[str] | None = None
    field: str = "tool_choice"


def calling(request: GenerationRequest, tools: Sequence[Tool], chosen: Chosen) -> GenerationRequest:
    """As it chooses of these. InvalidRequest: there is no such tool."""
    known = dict.fromkeys(tool.name for tool in tools)
    if chosen.mode == "required" and not known:
        raise InvalidRequest("tool_choice", "needs tools")
    names = known if chosen.names is None else dict.fromkeys(chosen.names)
    if unknown := [name for name in names if name not in known]:
        raise InvalidRequest(chosen.field, f"must name one of tools, got {unknown[0][:64]!r}")
    if known and not names:
        raise InvalidRequest(chosen.field, "must name one of tools at least")
    if chosen.mode == "required":
        return replace(request, must_call=tuple(names))
    return replace(request, may_call=() if names == known else tuple(names))


class FunctionReply(Struct):
    name: str
    arguments: str


class ToolCallReply(Struct):
    id: str
    function: FunctionReply
    type: Literal["function"] = "function"


class FunctionDelta(Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(Struct, kw_only=True):
    """Of one call only the first has its id, type and name."""

    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta
