"""The Python client: `Client`, `AsyncClient`, what they hand out and what they raise."""

from kaiten.client.aio import AsyncClient, AsyncGeneration
from kaiten.client.errors import (
    AlreadyExistsError,
    ApiError,
    CertificateError,
    DataLossError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    PreconditionError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from kaiten.client.request import GenerateOptions
from kaiten.client.results import (
    Choice,
    Completion,
    Delta,
    FinishReason,
    Prompt,
    RequestStatus,
    Timings,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from kaiten.client.sync import Client, Generation
from kaiten.tls import TLS

__all__ = [
    "TLS",
    "AlreadyExistsError",
    "ApiError",
    "AsyncClient",
    "AsyncGeneration",
    "CertificateError",
    "Choice",
    "Client",
    "Completion",
    "DataLossError",
    "DeadlineExceededError",
    "Delta",
    "FinishReason",
    "GenerateOptions",
    "Generation",
    "InternalServerError",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "PreconditionError",
    "Prompt",
    "RequestCancelledError",
    "RequestStatus",
    "Timings",
    "TokenLogprobs",
    "ToolCall",
    "ToolCallDelta",
    "UnauthenticatedError",
    "UnavailableError",
    "Usage",
]
