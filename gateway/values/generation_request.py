"""What a client asked for: both protocols become an Ask, and only an Ask is checked.

Values are as the client wrote them, right or wrong; `validation` judges them. `field` names where a
value came from, in the words of the proto.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from kaiten.v1.common_pb2 import SamplingParams
from service_kit.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """Tokenized as it is, special tokens included."""

    field: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Used as it is."""

    field: ClassVar[str] = "token_ids.ids"
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str
    # Who of that role speaks; empty: not said.
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Rendered by the model's chat template; control tokens inside a content stay plain text."""

    field: ClassVar[str] = "conversation.messages"
    messages: tuple[Message, ...]
    # For the chat template, by name; only names that the gateway allows.
    options: tuple[tuple[str, object], ...] = ()


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
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
    include_stop: bool = False
    show_special_tokens: bool = False
    with_cursors: bool = False
    # Larger runs first.
    priority: int = 0
    # Seconds from now; None: no deadline.
    timeout_s: float | None = None
    # How long after it this gateway speaks for a scheduler that does not.
    grace_s: float = 1.0
    traceparent: str = ""
    # Kept with the request for `Front.note`.
    note: bytes = b""
