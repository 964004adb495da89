"""What a client asked for: both protocols become a request, and only a request is checked.

Values are as the client wrote them, right or wrong; `validation` judges them. `field` names where a
value came from, in the words of the proto.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from kaiten.v1.common_pb2 import SamplingParams
from service_kit.errors import InvalidRequest, Overloaded, Unavailable


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Tokenized as it is, special tokens included."""

    field: ClassVar[str] = "text"
    text: str
    # With what the tokenizer puts around a text, such as BOS.
    adds_specials: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Used as it is."""

    field: ClassVar[str] = "token_ids.ids"
    token_ids: tuple[int, ...]


# What a tool that says nothing of its parameters takes.
NO_PARAMETERS: Final = '{"type": "object", "properties": {}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may call. `parameters`: a JSON Schema, as JSON."""

    name: str
    parameters: str
    description: str = ""
    # Its arguments keep to the schema also where no call must be made.
    is_strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call that the model made. `arguments`: an object, as JSON."""

    id: str
    name: str
    arguments: str
    # Where it was written, in the client's words; empty: by its number in its turn.
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    # None: nothing but calls.
    content: str | None
    # Who of that role speaks; empty: not said.
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    # Of a tool's answer: to which call.
    tool_call_id: str = ""
    # Where it was written, in the client's words; empty: by its number.
    place: str = field(default="", compare=False)

    def texts(self) -> Iterator[str]:
        yield from (self.content or "", self.reasoning, self.tool_call_id)
        for call in self.tool_calls:
            yield from (call.id, call.name, call.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Rendered by the model's chat template; control tokens inside a content stay plain text."""

    field: ClassVar[str] = "conversation.messages"
    messages: tuple[Message, ...]
    # For the chat template, by name; only names that the gateway allows.
    options: tuple[tuple[str, object], ...] = ()
    tools: tuple[Tool, ...] = ()
    # The prompt ends with the beginning of the assistant's turn.
    opens_turn: bool = True
    # It ends within the last message, which goes on.
    goes_on: bool = False

    def place(self, index: int) -> str:
        """Where a turn was written."""
        return self.messages[index].place or f"{self.field}.{index}"

    def texts(self) -> Iterator[str]:
        """All that a client wrote, but for names that are checked by themselves."""
        for message in self.messages:
            yield from message.texts()
        for tool in self.tools:
            yield from (tool.description, tool.parameters)
        yield from (value for _, value in self.options if isinstance(value, str))


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One request. `body_hash` tells a repeat from another request under the same id."""

    prompt: Prompt
    body_hash: bytes
    request_id: str = ""
    model: str = ""
    # A field that is not set means the model's default.
    sampling: SamplingParams = field(default_factory=SamplingParams)
    # What was wrong with the values that `sampling` was made of; None: it is still to be judged.
    sampling_wrong: Sequence[InvalidRequest] | None = None
    # Without max_tokens: so many, or fewer where the context ends before. None: to its end.
    default_max_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] = ()
    return_token_ids: bool = False
    keep_running: bool = False
    # Until its deadline, where others wait as long as the gateway says.
    awaits_workers: bool = False
    include_stop: bool = False
    show_special_tokens: bool = False
    with_cursors: bool = False
    # Its client is told event by event.
    is_stream: bool = field(default=False, compare=False)
    # The gateway reads the output: tool calls and reasoning come apart from its text.
    is_read: bool = False
    # Names of tools of which one must be called; empty: as the model likes.
    must_call: tuple[str, ...] = ()
    # Names of tools of which others must not be called; empty: any may.
    may_call: tuple[str, ...] = ()
    # One call at most.
    is_single_call: bool = False
    # Larger runs first.
    priority: int = 0
    # Seconds from now; None: no deadline.
    timeout_s: float | None = None
    # How long after it this gateway speaks for a scheduler that does not.
    grace_s: float = 1.0
    traceparent: str = ""
    # When its first byte was here, by `perf_counter_ns`; 0: not known.
    arrived_ns: int = field(default=0, compare=False)
    # Kept with the request for `GenerationService.note`.
    note: bytes = b""

    def is_put_off(self, error: BaseException) -> bool:
        """A line of a batch is asked again: nobody is refused."""
        return self.awaits_workers and isinstance(error, Overloaded | Unavailable)
