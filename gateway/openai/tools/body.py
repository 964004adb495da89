"""Tools as OpenAI's clients tell them, checked, and as chat templates read them."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from gateway.openai.request_body import RequestBody
from gateway.text.tools.formats import AnswerFormats
from gateway.text.tools.grammar import Function, calls_grammar
from service_kit.errors import InvalidRequest

TOOLS_MAX: Final = 128
NAME: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")


class FunctionBody(RequestBody):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of the arguments. Left out: any object."""
    strict: bool | None = None


class ToolBody(RequestBody):
    type: Literal["function"]
    function: FunctionBody


class FunctionName(RequestBody):
    name: str


class NamedTool(RequestBody):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(RequestBody):
    name: str
    arguments: str
    """The text of a JSON object."""


class ToolCallBody(RequestBody):
    """As an answer told it."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def told(self, field: str) -> dict[str, Any]:
        """As templates read it: with the arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            raise InvalidRequest(f"{field}.function.arguments", "must be the text of a JSON object")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Tooling:
    """The tools of one request. InvalidRequest: they are wrong, or the model knows none."""

    def __init__(
        self,
        tools: Sequence[ToolBody],
        choice: ToolChoice | None,
        formats: AnswerFormats,
        *,
        is_parallel: bool,
    ) -> None:
        self._tools = [] if choice == "none" else list(tools)
        self._choice = "auto" if choice is None else choice
        self._formats = formats
        self._is_parallel = is_parallel
        if tools and formats.tools is None:
            raise InvalidRequest(
                "tools", "this model's chat template knows no tools, or a format unknown here"
            )
        self._check(tools)

    def _check(self, tools: Sequence[ToolBody]) -> None:
        names = [tool.function.name for tool in tools]
        if len(names) > TOOLS_MAX:
            raise InvalidRequest("tools", f"must have at most {TOOLS_MAX} tools, got {len(names)}")
        for index, name in enumerate(names):
            field = f"tools[{index}].function.name"
            if not NAME.fullmatch(name):
                raise InvalidRequest(field, f"must match {NAME.pattern}, got {name[:80]!r}")
            if name in names[:index]:
                raise InvalidRequest(field, f"must be of one tool only, and {name!r} is of two")
        if isinstance(self._choice, NamedTool) and self._choice.function.name not in names:
            name = self._choice.function.name[:80]
            raise InvalidRequest("tool_choice", f"must name one of the tools, got {name!r}")
        if self._choice == "required" and not names:
            raise InvalidRequest("tool_choice", "must be auto or none without tools")
        formats = self._formats.tools
        if self._tools and not (self._is_parallel or self._is_forced or (formats and formats.end)):
            rule = "can be false for this model only with a tool_choice other than auto"
            raise InvalidRequest("parallel_tool_calls", rule)

    @property
    def is_used(self) -> bool:
        """Whether the answer may hold calls."""
        return bool(self._tools)

    @property
    def shows_markers(self) -> bool:
        """Whether a marker is a control token, which texts hide as a rule."""
        return self.is_used and bool(self._formats.marker_ids)

    @property
    def _is_forced(self) -> bool:
        return self._choice == "required" or isinstance(self._choice, NamedTool)

    @property
    def grammar(self) -> str:
        """What the answer must be, where it must be calls; else empty."""
        if not (self._is_forced and self._formats.tools):
            return ""
        named = self._choice.function.name if isinstance(self._choice, NamedTool) else None
        functions = [
            Function(each.function.name, each.function.parameters)
            for each in self._tools
            if named in (None, each.function.name)
        ]
        is_one = named is not None or not self._is_parallel
        return calls_grammar(
            self._formats.tools, functions, self._formats.marker_ids, is_one=is_one
        )

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends the answer besides: after one call, where more are not wanted."""
        formats = self._formats.tools
        if self._is_parallel or self._is_forced or not self._tools or formats is None:
            return ()
        return (formats.end,)

    @property
    def told(self) -> tuple[Mapping[str, Any], ...]:
        """As templates read them."""
        return tuple(each.model_dump(exclude_none=True) for each in self._tools)
