"""The Python client: `Client`, `AsyncClient`, what they hand out and what they raise."""

from kaiten.client.aio import AsyncClient, AsyncGeneration
from kaiten.client.errors import (
    AlreadyExistsError,
    ApiError,
    CertificateError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from kaiten.client.results import Completion, Delta, RequestStatus, ToolCall, ToolCallDelta
from kaiten.client.sync import Client, Generation
from kaiten.tls import TLS

__all__ = [
    "TLS",
    "AlreadyExistsError",
    "ApiError",
    "AsyncClient",
    "AsyncGeneration",
    "CertificateError",
    "Client",
    "Completion",
    "DeadlineExceededError",
    "Delta",
    "Generation",
    "InternalServerError",
    "InvalidRequestError",
    "NotFoundError",
    "OverloadedError",
    "RequestCancelledError",
    "RequestStatus",
    "ToolCall",
    "ToolCallDelta",
    "UnauthenticatedError",
    "UnavailableError",
]
