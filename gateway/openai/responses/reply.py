"""A response as it is answered, whole and in its states; OpenAI's names."""

from typing import Any, Final, Literal

from msgspec import UNSET, Struct, UnsetType, field

from gateway.openai.chat import ChatTokenLogprob
from gateway.openai.listing import Listing
from gateway.openai.usage import Count, Timing
from gateway.openai.usage import Usage as OtherUsage
from gateway.values import request_ids

ID_PREFIX: Final = request_ids.RESPONSE
# Behind a response's own name, in ids of what it was asked and of messages behind its first: no
# name that a client gives has it.
NUMBERED: Final = "~"
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[None] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


class OutputMessage(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[None] = field(default_factory=list)
    content: list[ReasoningText]
    status: ItemStatus


class CallItem(Struct, kw_only=True, tag_field="type", tag="function_call"):
    """`call_id` is what its answer must name."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


OutputItem = OutputMessage | ReasoningItem | CallItem


class ResponseProblem(Struct):
    # The second: the request is wrong. Of OpenAI's own words no other says that.
    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class InputTokensDetails(Struct):
    cached_tokens: Count
    # Nobody pays for what is kept.
    cache_write_tokens: Count = 0


class OutputTokensDetails(Struct):
    reasoning_tokens: Count


class ResponseUsage(Struct, kw_only=True):
    input_tokens: Count
    input_tokens_details: InputTokensDetails
    output_tokens: Count
    output_tokens_details: OutputTokensDetails
    total_tokens: Count


class ReasoningReply(Struct):
    effort: str | None = None
    summary: str | None = None


class AnyText(Struct, tag_field="type", tag="text"):
    pass


class AnyJson(Struct, tag_field="type", tag="json_object"):
    pass


class JsonOfSchema(Struct, kw_only=True, tag_field="type", tag="json_schema"):
    name: str | None
    description: str | None
    schema: dict[str, Any]
    strict: bool | None


TextFormat = AnyText | AnyJson | JsonOfSchema


class TextReply(Struct):
    format: TextFormat = field(default_factory=AnyText)
    verbosity: str | None = None


class ToolReply(Struct, kw_only=True):
    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None


class ToolChoiceReply(Struct, kw_only=True, tag_field="type", tag="function"):
    """Of one function."""

    name: str


class AllowedToolsReply(Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[ToolChoiceReply]


class ConversationName(Struct):
    id: str


class Asked(Struct, kw_only=True):
    """What a response says of its request. Kept with it, so that it can be told again."""

    created_at: Count
    background: bool
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    previous_response_id: str | None
    conversation: ConversationName | None = None
    reasoning: ReasoningReply
    store: bool
    temperature: float
    top_logprobs: Count
    top_p: float
    parallel_tool_calls: bool = True
    tool_choice: str | ToolChoiceReply | AllowedToolsReply = "auto"
    tools: list[ToolReply] = field(default_factory=list)
    text: TextReply = field(default_factory=TextReply)
    # What it was: by default and flex are all there are here.
    service_tier: Literal["default", "flex"] = "default"
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    truncation: Literal["auto", "disabled"] = "disabled"


class QueuePlace(Struct):
    """Of one that has not begun: 1 is next; and what it waits for, in words."""

    position: Count
    reason: str


class Response(Asked, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    status: Status
    model: str
    # Seconds, as created_at. Only of one that has come to its own end.
    completed_at: Count | None = None
    output: list[OutputItem] = field(default_factory=list)
    error: ResponseProblem | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    # Where the time went, of one that has ended.
    kaiten: Timing | None = None
    queue: QueuePlace | None = None


class DeletedResponse(Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(Struct, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Count


class InputTextReply(Struct):
    type: Literal["input_text", "output_text"]
    text: str
    # Of what was said, as in an answer.
    annotations: list[None] | UnsetType = UNSET


class MessageItem(Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str
    status: ItemStatus = "completed"
    content: list[InputTextReply]


class CallOutputItem(Struct, kw_only=True, tag_field="type", tag="function_call_output"):
    id: str
    call_id: str
    output: str
    status: Literal["completed"] = "completed"


Item = MessageItem | ReasoningItem | CallItem | CallOutputItem


class InputItems(Listing, kw_only=True):
    data: list[Item]


def usage_of(usage: OtherUsage) -> ResponseUsage:
    """The same in the words of this endpoint, of all of an answer."""
    assert usage.prompt_tokens_details
    assert usage.completion_tokens_details
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def message_id(response_id: str) -> str:
    return f"msg_{response_id.removeprefix(ID_PREFIX)}"
