"""What both clients share: where to connect, with which options, for how long."""

import asyncio
import json
import math
import os
import time
from collections.abc import Sequence
from numbers import Real
from typing import Final

from kaiten.client.errors import DeadlineExceededError, InvalidRequestError

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
# How long a lost gateway is looked for before UnavailableError.
RESUME_S: Final = 30.0
UNARY_S: Final = 10.0
# What gRPC cannot say it takes for over at once.
TIMEOUT_S_MAX: Final = 10_000_000.0
# Requests that `complete_all` has under way: more than one worker has slots for.
AT_ONCE: Final = 256
# A gateway's default for all its clients together.
AT_ONCE_MAX: Final = 4096
# What gRPC does by itself: spread calls over every address of the name, and repeat a call that no
# gateway took. deploy/service-config.json is the same for other languages.
SERVICE_CONFIG: Final = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [
                {"service": "kaiten.v1.InferenceService"},
                {"service": "kaiten.v1.ModelService"},
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}
OPTIONS: Final = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG)),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The timeout that really ends a connection; left alone it is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # gRPC's own second-long first wait would be most of a gateway's restart.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class Lifetime:
    """Of a client: it is of its process, and of its event loop if it has one, until closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._pid = os.getpid()
        self._loop = loop
        self.is_closed = False

    @property
    def is_forked(self) -> bool:
        """gRPC's threads are not forked: calls, and their ends, would wait for ever."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """RuntimeError: a call is not for this process, or this loop."""
        if self.is_forked:
            raise RuntimeError(
                "the client is of the process that this was forked from: make one of its own"
            )
        if self._loop is not None and asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("the client is of another event loop: make one in this")

    def check_open(self) -> None:
        """The same, and RuntimeError: it was closed."""
        self.check()
        if self.is_closed:
            raise RuntimeError("the client was closed: make another")


def with_key(
    metadata: Sequence[tuple[str, str]], api_key: str | None
) -> tuple[tuple[str, str], ...]:
    """What goes with every call. ValueError: no header can hold the key."""
    if api_key is None:
        return tuple(metadata)
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: must be printable ASCII; is a line end of its file part of it?")
    return (*metadata, ("authorization", f"Bearer {api_key}"))


def deadline_of(timeout_s: object) -> float | None:
    """When a request's time ends, by the monotonic clock. InvalidRequestError: it is no time."""
    if timeout_s is None:
        return None
    seconds = float(timeout_s) if isinstance(timeout_s, Real) else math.nan
    if not seconds > 0:
        rule = f"timeout_s: must be seconds, more than 0, got {timeout_s!r}"
        raise InvalidRequestError(rule, fields=("timeout_s",))
    return time.monotonic() + min(seconds, TIMEOUT_S_MAX)


def seconds_left(deadline_s: float | None) -> float | None:
    """The rest of a request's time, for the next call."""
    if deadline_s is None:
        return None
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceededError("the request's time ran out while its service was away or full")
    return left_s
