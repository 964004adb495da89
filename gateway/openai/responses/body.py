"""What POST /v1/responses reads: text in, and settings to sample by."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from gateway.http.json_body import cut
from gateway.openai.chat import RefusalPart
from gateway.openai.fields.structured_outputs import OTHER_NAMES, ResponseTextFormat
from gateway.openai.fields.tools import Choice, Chosen, calling, tools_of
from gateway.openai.generation_body import SamplingBody
from gateway.openai.packing import keepable
from gateway.openai.request_body import (
    FAIL_FAST,
    METADATA_VALUE_CHARS_MAX,
    RequestBody,
    check_metadata,
)
from gateway.openai.responses.included import LOGPROBS_INCLUDED, Included
from gateway.openai.responses.reply import (
    AllowedToolsReply,
    AnyJson,
    AnyText,
    JsonOfSchema,
    ReasoningReply,
    TextFormat,
    TextReply,
    ToolChoiceReply,
    ToolReply,
)
from gateway.requests.validation import Limits, check_option
from gateway.values import request_ids
from gateway.values.generation_request import ChatPrompt, GenerationRequest, Message, ToolCall
from service_kit.errors import InvalidRequest

TOLD_AGAIN: Final = ("user", "safety_identifier", "prompt_cache_key")


class InputText(RequestBody):
    """A part of a content. What a part of an answer has besides may be there if it says nothing."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    """What the SDKs' `parse` made of the text."""


def _part_kind(part: Any) -> str:
    """The name of its model: a tag that is called as a key would be taken for one."""
    is_refusal = isinstance(part, dict) and part.get("type") == "refusal"
    return "RefusalPart" if is_refusal else "InputText"


InputPart = Annotated[
    Annotated[InputText, Tag("InputText")] | Annotated[RefusalPart, Tag("RefusalPart")],
    Discriminator(_part_kind),
]
InputContent = str | Annotated[list[InputPart], FAIL_FAST]


def _speaks(role: str) -> str:
    if role == "tool":
        rule = "must not be tool: what came of a call is an item of type function_call_output"
        raise PydanticCustomError("role", rule)
    return role


class InputMessage(RequestBody):
    """A turn, also as an answer has it: then `id`, `status` and `phase` say nothing."""

    type: Literal["message"] = "message"
    role: Annotated[str, AfterValidator(_speaks)]
    content: InputContent
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    def added_to(self, turns: list[Message], place: str = "") -> None:
        """ "developer" is OpenAI's newer word for what templates call "system"."""
        text, last = _text(self.content), turns[-1] if turns else None
        is_begun = last is not None and last.content is None and not last.tool_calls
        if self.role == "assistant" and last is not None and is_begun:
            turns[-1] = replace(last, content=text)
        else:
            role = "system" if self.role == "developer" else self.role
            turns.append(Message(role=role, content=text, place=place))


class FunctionCallInput(RequestBody):
    """A call, as an answer has it."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    parsed_arguments: Any = None
    """What the SDKs' `parse` made of the arguments."""

    def added_to(self, turns: list[Message], place: str = "") -> None:
        call = ToolCall(id=self.call_id, name=self.name, arguments=self.arguments, place=place)
        if turns and turns[-1].role == "assistant":
            turns[-1] = replace(turns[-1], tool_calls=(*turns[-1].tool_calls, call))
        else:
            turn = Message(role="assistant", content=None, tool_calls=(call,), place=place)
            turns.append(turn)


class FunctionOutputInput(RequestBody):
    """What came of a call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(min_length=1)]
    output: InputContent
    id: str | None = None
    status: str | None = None

    def added_to(self, turns: list[Message], place: str = "") -> None:
        text = _text(self.output)
        turn = Message(role="tool", content=text, tool_call_id=self.call_id, place=place)
        turns.append(turn)


class InputReasoningText(RequestBody):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningInput(RequestBody):
    """Reasoning, as an answer has it: of the assistant's turn that follows."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[InputReasoningText] | None = None
    content: list[InputReasoningText] | None = None
    encrypted_content: None = None
    status: str | None = None

    def added_to(self, turns: list[Message], place: str = "") -> None:
        text = "".join(part.text for part in self.content or ())
        turns.append(Message(role="assistant", content=None, reasoning=text, place=place))


class ItemReference(RequestBody):
    """An item that a stored response said, by its id."""

    type: Literal["item_reference"]
    id: str


def _text(content: str | list[InputText | RefusalPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _kind(item: Any) -> str:
    """A message need not say that it is one."""
    kind = item.get("type") if isinstance(item, dict) else None
    return kind if kind in KINDS else "message"


def _of_kinds(item: Any, kinds: Sequence[str]) -> Any:
    """Before anything else that is wrong with it: other kinds have other keys."""
    if isinstance(item, dict) and (kind := item.get("type", "message")) not in kinds:
        rule = f"must be {', '.join(kinds)}; got {cut(repr(kind))}"
        # Braces would be places for what is in the context.
        raise PydanticCustomError("unknown", "{rule}", {"key": "type", "rule": rule})
    return item


WHOLE_KINDS: Final = ("message", "function_call", "function_call_output", "reasoning")
KINDS: Final = (*WHOLE_KINDS, "item_reference")
InputItem = InputMessage | FunctionCallInput | FunctionOutputInput | ReasoningInput
TaggedItem = (
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCallInput, Tag("function_call")]
    | Annotated[FunctionOutputInput, Tag("function_call_output")]
    | Annotated[ReasoningInput, Tag("reasoning")]
)
WholeItem = Annotated[
    TaggedItem, Discriminator(_kind), BeforeValidator(partial(_of_kinds, kinds=WHOLE_KINDS))
]
GivenItem = Annotated[
    TaggedItem | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
    BeforeValidator(partial(_of_kinds, kinds=KINDS)),
]


class ConversationReference(RequestBody):
    id: str


class ResponseTool(RequestBody):
    """As in chat, without the object around a function."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def reply(self) -> ToolReply:
        return ToolReply(
            name=self.name,
            description=self.description,
            parameters=keepable(self.parameters),
            strict=self.strict,
        )


class ResponseNamedChoice(RequestBody):
    type: Literal["function"]
    name: str


class ResponseAllowedChoice(RequestBody):
    """As in chat, without the object around it."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseTool], FAIL_FAST]


class TextConfig(RequestBody):
    format: ResponseTextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """A wish, which models here have no word for."""


class Reasoning(RequestBody):
    effort: str | None = None
    """For chat templates that ask for it."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """There is none: all of the reasoning is told."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """As OpenAI called it before."""


class ResponseStreamOptions(RequestBody):
    include_obfuscation: bool | None = None


class ResponseBody(SamplingBody):
    """POST /v1/responses."""

    identity: ClassVar[bytes] = request_ids.RESPONSE.encode()
    hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("messages", "prompt"), "here it is input"),
        **dict.fromkeys(("max_tokens", "max_completion_tokens"), "here it is max_output_tokens"),
        **dict.fromkeys(OTHER_NAMES, "here it is structured_outputs"),
        "logprobs": f"here it is include, with {LOGPROBS_INCLUDED!r}",
        "n": "a response has one answer",
        "reasoning_effort": "here it is reasoning.effort",
        "response_format": "here it is text.format",
    }

    input: str | Annotated[list[GivenItem], FAIL_FAST] | None = None
    """A user's text, or turns that the model's chat template takes. May be left out where there is
    something else to answer: a conversation, an earlier response, instructions."""
    instructions: str | None = None
    """A system message before all others. Of `previous_response_id` they are not taken over."""
    previous_response_id: str | None = None
    """Go on with that conversation: what it was asked and answered comes before `input`. For as
    long as it is kept."""
    conversation: str | ConversationReference | None = None
    """One of /v1/conversations: its items come before `input`, which becomes a part of it with the
    answer, once it has ended and if it was not cancelled. Not with previous_response_id."""
    max_output_tokens: int | None = None
    """With the prompt's tokens at most the context. Left out: to its end."""
    include: list[Included] | None = None
    """Reasoning is never encrypted: asking for it adds nothing."""
    top_logprobs: int | None = None
    """Needs include."""
    metadata: dict[str, str] | None = None
    """Yours: told again with the response. At most 16 of 64 and 512 characters."""
    user: str | None = None
    """As metadata: told again, and nothing else comes of it. At most 512 characters. So are the
    next two."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    """Keep computing when the client leaves; come back by GET /v1/responses/{id}."""
    store: bool | None = None
    """false: nobody finds it later. Left out: true."""
    truncation: Literal["auto", "disabled"] | None = None
    """auto: a conversation that the context cannot hold loses its oldest turns, not the system's. A
    long one is tokenized several times for it."""
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: Annotated[list[ResponseTool], FAIL_FAST] | None = None
    """At most 128 functions, for models whose chat template knows tools."""
    tool_choice: Choice | ResponseNamedChoice | ResponseAllowedChoice | None = None
    """As in chat."""
    parallel_tool_calls: bool | None = None
    """false: one call at most, with which the output ends."""

    def named(self, field: str) -> str:
        if field.startswith("conversation.messages."):
            return "input"
        return super().named(field).removeprefix("conversation.")

    @property
    def told_choice(self) -> str | ToolChoiceReply | AllowedToolsReply:
        match self.tool_choice:
            case ResponseNamedChoice(name=name):
                return ToolChoiceReply(name=name)
            case ResponseAllowedChoice(mode=mode, tools=tools):
                return AllowedToolsReply(
                    mode=mode, tools=[ToolChoiceReply(name=each.name) for each in tools]
                )
            case choice:
                return choice or "auto"

    @property
    def _chosen(self) -> Chosen:
        match self.tool_choice:
            case ResponseNamedChoice(name=name):
                return Chosen("required", [name])
            case ResponseAllowedChoice(mode=mode, tools=tools):
                return Chosen(mode, [each.name for each in tools], "tool_choice.tools")
            case choice:
                return Chosen(choice or "auto")

    @property
    def told_reasoning(self) -> ReasoningReply:
        asked = self.reasoning or Reasoning()
        return ReasoningReply(asked.effort, asked.summary or asked.generate_summary)

    @property
    def told_text(self) -> TextReply:
        return TextReply(self._told_format, None if self.text is None else self.text.verbosity)

    @property
    def _told_format(self) -> TextFormat:
        asked = self.output_format[1]
        if asked is None or asked.type == "text":
            return AnyText()
        if asked.type == "json_object":
            return AnyJson()
        return JsonOfSchema(
            # OpenAI's clients read a text.
            name=asked.name or "schema",
            description=asked.description,
            # Without one it is refused.
            schema=keepable(asked.schema_ or {}),
            strict=asked.strict,
        )

    @property
    def output_format(self) -> tuple[str, ResponseTextFormat | None]:
        return "text.format", None if self.text is None else self.text.format

    @property
    def aliases(self) -> Mapping[str, str]:
        return {
            **super().aliases,
            "conversation.messages": "input",
            "sampling.logprobs": "top_logprobs",
            "sampling.max_tokens": "max_output_tokens",
        }

    @property
    def conversation_id(self) -> str | None:
        asked = self.conversation
        return asked.id if isinstance(asked, ConversationReference) else asked

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS_INCLUDED in (self.include or ())

    def references(self) -> list[tuple[int, str]]:
        """Items of `input` that say only an id: where, and which."""
        given = enumerate(() if isinstance(self.input, str) else self.input or ())
        return [(index, item.id) for index, item in given if isinstance(item, ItemReference)]

    def turns(self, referenced: Mapping[str, InputItem]) -> list[Message]:
        """Those of `input`. What an assistant thought, said and called is one."""
        if isinstance(self.input, str):
            return [Message(role="user", content=self.input, place="input")]
        turns: list[Message] = []
        for index, given in enumerate(self.input or ()):
            item = referenced[given.id] if isinstance(given, ItemReference) else given
            item.added_to(turns, f"input.{index}")
        return turns

    def response_request(self, turns: Sequence[Message], limits: Limits) -> GenerationRequest:
        """`turns`: all of them, but for the instructions."""
        self._check()
        options: dict[str, Any] = {}
        if self.reasoning is not None and self.reasoning.effort is not None:
            check_option("reasoning.effort", "reasoning_effort", limits)
            options["reasoning_effort"] = self.reasoning.effort
        if self.instructions is not None:
            field = "instructions"
            turns = [Message(role="system", content=self.instructions, place=field), *turns]
        tools = tools_of(self.tools or ())
        prompt = ChatPrompt(
            messages=tuple(turns),
            options=tuple(options.items()),
            tools=() if self.tool_choice == "none" else tools,
        )
        logprobs = (self.top_logprobs or 0) if self.with_logprobs else None
        read = replace(
            self.request(prompt, limits, logprobs=logprobs, max_tokens=self.max_output_tokens),
            is_read=True,
            is_single_call=self.parallel_tool_calls is False,
        )
        return calling(read, tools, self._chosen)

    def _check(self) -> None:
        """What depends on two fields, and what is bounded only here."""
        if self.top_logprobs and not self.with_logprobs:
            raise InvalidRequest("top_logprobs", f"needs include to have {LOGPROBS_INCLUDED!r}")
        if self.background and not self.is_stored:
            raise InvalidRequest("background", "needs store: nobody could come back for it")
        if self.conversation is not None and not self.is_stored:
            raise InvalidRequest("conversation", "needs store: its answer is kept there")
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest("conversation", "must not be given with previous_response_id")
        if self.max_output_tokens == 0:
            raise InvalidRequest("max_output_tokens", "must be at least 1, got 0")
        check_metadata(self.metadata)
        for field in TOLD_AGAIN:
            if len(getattr(self, field) or "") > METADATA_VALUE_CHARS_MAX:
                rule = f"must have at most {METADATA_VALUE_CHARS_MAX} characters"
                raise InvalidRequest(field, rule)
