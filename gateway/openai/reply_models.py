"""What the HTTP routes answer: each model is written as JSON and documented as it stands here.

A field that may be UNSET is left out then; every other one is always there.
"""

from typing import Any, Literal, TypeAlias

from msgspec import UNSET, Struct, UnsetType

# Of finish reasons only these two are answers; a stored request may tell the others.
FinishWord: TypeAlias = Literal["stop", "length"]
StoredStatus: TypeAlias = Literal["completed", "failed", "expired", "cancelled"]
EndWord: TypeAlias = Literal["stop", "length", "cancelled", "deadline_exceeded", "error"]


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    """Sums over the prompts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timing(Struct):
    """Where the time went, of several prompts the longest. OpenAI has no word for it."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    tokens_per_s: float | None
    preemptions: int


class PromptLogprob(Struct):
    """As vLLM has it."""

    logprob: float | None
    rank: int | None
    decoded_token: str


# By position, then by token id; of the first token there is none.
PromptLogprobs: TypeAlias = list[dict[str, PromptLogprob] | None]


class TopLogprob(Struct):
    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class _Envelope(Struct, kw_only=True):
    id: str
    created: int
    model: str


class _Reply(_Envelope, kw_only=True):
    usage: Usage
    kaiten: Timing


class _Chunk(_Envelope, kw_only=True):
    """An event of a stream. `usage` is null until the last one, and only there at all with
    stream_options.include_usage."""

    usage: Usage | UnsetType | None = UNSET
    kaiten: Timing | UnsetType = UNSET


class _Choice(Struct, kw_only=True):
    """`token_ids` with return_token_ids."""

    index: int
    finish_reason: FinishWord
    token_ids: list[int] | UnsetType = UNSET


class _ChunkChoice(Struct, kw_only=True):
    """`token_ids` with return_token_ids, `position` with stream_options.include_position."""

    index: int
    finish_reason: FinishWord | None = None
    token_ids: list[int] | UnsetType = UNSET
    position: int | UnsetType = UNSET


class ChatMessage(Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(_Choice, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class Chat(_Reply, kw_only=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatDelta(Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(_ChunkChoice, kw_only=True):
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None


class ChatChunk(_Chunk, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class CompletionChoice(_Choice, kw_only=True):
    text: str
    logprobs: TextLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(_Reply, kw_only=True):
    """The answer of /v1/completions. Choices may be of different prompts."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class CompletionChunkChoice(_ChunkChoice, kw_only=True):
    text: str
    logprobs: TextLogprobs | None = None


class CompletionChunk(_Chunk, kw_only=True):
    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]


class Accepted(Struct):
    """With `background`."""

    id: str
    object: Literal["request"] = "request"
    status: Literal["queued"] = "queued"


class QueuePosition(Struct):
    position: int
    reason: str


class LiveRequest(Struct, kw_only=True):
    """A stored request that has not ended."""

    id: str
    object: Literal["request"] = "request"
    status: Literal["queued", "in_progress"]
    queue: QueuePosition | UnsetType = UNSET


class StoredChoice(Struct, kw_only=True):
    index: int
    text: str
    finish_reason: EndWord
    output_tokens: int
    error: str | UnsetType = UNSET


class FinishedRequest(Struct, kw_only=True):
    """A stored request, whatever its endpoint was. `status` is that of its gravest choice."""

    id: str
    object: Literal["request"] = "request"
    status: StoredStatus
    model: str
    choices: list[StoredChoice]
    usage: Usage
    kaiten: Timing
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class CancelledRequest(Struct, kw_only=True):
    id: str
    object: Literal["request"] = "request"
    was_live: bool


class Model(Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kaiten"] = "kaiten"
    max_model_len: int


class Models(Struct):
    data: list[Model]
    object: Literal["list"] = "list"


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(Struct):
    prompt: str


class Health(Struct):
    status: Literal["ok"] = "ok"


class Serving(Struct):
    status: Literal["serving"] = "serving"


class NotServing(Struct):
    reason: str
    status: Literal["not_serving"] = "not_serving"


class Version(Struct):
    version: str


class Document(Struct):
    """OpenAPI 3.1."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
