"""What a client asked for: both protocols become an Ask, and only an Ask is checked.

Fields are plain Python values as the client wrote them, right or wrong; `validate` judges them.
`field` names where a value came from, in the words of the proto.
"""

from dataclasses import dataclass
from typing import ClassVar


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Rendered by the model's chat template; control tokens inside a content stay plain text."""

    field: ClassVar[str] = "conversation.messages"
    messages: tuple[Message, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingAsk:
    """None means: the model's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `body_hash` tells a repeat from another request under the same id."""

    prompt: Prompt
    body_hash: bytes
    request_id: str = ""
    model: str = ""
    sampling: SamplingAsk = SamplingAsk()
    n: int | None = None
    stop: tuple[str, ...] = ()
    return_token_ids: bool = False
    keep_running: bool = False
    # Seconds from now; None: no deadline.
    timeout_s: float | None = None
    traceparent: str = ""
