"""The Python client: `Client`, `AsyncClient`, what they hand out and what they raise."""

from kaiten.client.aio import AsyncClient, AsyncGeneration
from kaiten.client.errors import (
    AlreadyExistsError,
    ApiError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from kaiten.client.results import Completion, Delta, RequestStatus
from kaiten.client.sync import Client, Generation

__all__ = [
    "AlreadyExistsError",
    "ApiError",
    "AsyncClient",
    "AsyncGeneration",
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
    "UnauthenticatedError",
    "UnavailableError",
]
