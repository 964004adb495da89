"""What a command says when a gateway did not do what it was asked for."""

from typing import Final

from rich.text import Text

from kaiten.api_key import HOW_TO_GIVE
from kaiten.client.errors import (
    ApiError,
    DeadlineExceededError,
    RequestCancelledError,
    UnauthenticatedError,
    UnavailableError,
)
from kaiten.client.results import Choice
from kaiten.console import console, harmless
from kaiten.tls import HTTP_1_HINT, TURNED_AWAY_HINT

SOMEBODY_IS_THERE: Final = (HTTP_1_HINT, TURNED_AWAY_HINT)
# A person is watching: say quickly that nobody answers.
RESUME_S: Final = 5.0


def problem_of(choice: Choice) -> ApiError | None:
    """Why it is no whole answer; None: it is one."""
    if choice.finish_reason == "error":
        return ApiError(choice.error)
    if choice.finish_reason == "cancelled":
        return RequestCancelledError("the request was cancelled: its answer is cut off")
    return None


def complain(error: ApiError, address: str) -> int:
    """Say what went wrong, and what to do; the exit code."""
    text = Text(harmless(f"error: {error}"), style="red")
    is_away = isinstance(error, UnavailableError)
    if isinstance(error, DeadlineExceededError) or (is_away and error.is_of_service):
        text.append(f"\nwhat it says of itself: kaiten healthcheck {address.partition(',')[0]}")
    elif is_away and not str(error).endswith(SOMEBODY_IS_THERE):
        asked = f"is a gateway listening on {address}? start one with: kaiten serve"
        bare = f"no port was given, and 443 was asked; kaiten serve has 50051: {address}:50051"
        text.append(f"\n{asked if ':' in address else bare}")
    elif isinstance(error, UnauthenticatedError):
        text.append(f"\n{HOW_TO_GIVE}")
    elif error.retry_after_s is not None:
        text.append(f"\ntry again in {error.retry_after_s:g} s")
    console(is_unfailing=True).print(text)
    return 1
