"""What both clients share: where to connect, with which options, for how long."""

import asyncio
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Final

from kaiten.client.errors import DeadlineExceededError, InvalidRequestError
from kaiten.tls import check_address

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
# How long a lost gateway is looked for before UnavailableError.
RESUME_S: Final = 30.0
UNARY_S: Final = 10.0
# Who leaves takes back what it asked for, and is kept no longer by a gateway that hangs.
LEAVING_S: Final = 2.0
# What gRPC cannot say it takes for over at once.
TIMEOUT_S_MAX: Final = 10_000_000.0
HEADER_NAME: Final = re.compile(r"[0-9a-z_.-]+")
# Requests that `complete_all` has under way: more than one worker has slots for.
AT_ONCE: Final = 256
# A gateway's default for all its clients together.
AT_ONCE_MAX: Final = 4096
# What gRPC does by itself: spread calls over every address of the name, and repeat a call that no
# gateway took. deploy/service-config.json is the same for other languages.
SERVICE_CONFIG: Final[dict[str, Any]] = {
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
# The client itself goes on with these. Were gRPC to repeat one, nobody would know that a connection
# broke, and what its gateway took for leaving would look like an answer.
FOLLOWED: Final = {
    "name": [
        {"service": "kaiten.v1.InferenceService", "method": name} for name in ("Generate", "Attach")
    ]
}
_METHODS: Final = {"methodConfig": [*SERVICE_CONFIG["methodConfig"], FOLLOWED]}
OPTIONS: Final = (
    ("grpc.service_config", json.dumps(SERVICE_CONFIG | _METHODS)),
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # The timeout that really ends a connection; left alone it is a minute.
    ("grpc.http2.ping_timeout_ms", 10_000),
    # gRPC's own second-long first wait would be most of a gateway's restart.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # No wait, whatever its name: how long a connection may take, until both sides have said hello.
    ("grpc.min_reconnect_backoff_ms", 5000),
)


class Lifetime:
    """Of a client: it is of its process, and of its event loop if it has one, until closed."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._pid = os.getpid()
        self._loop = loop
        self.is_closed = False
        self._wakes: dict[Callable[[], object], None] = {}

    @property
    def is_forked(self) -> bool:
        """gRPC's threads are not forked: calls, and their ends, would wait for ever."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """Whoever waits for something is woken."""
        self.is_closed = True
        for wake in tuple(self._wakes):
            wake()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """For the time of a wait that is in vain when the client is closed."""
        self._wakes[wake] = None
        try:
            if self.is_closed:
                wake()
            yield
        finally:
            del self._wakes[wake]

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


def checked_address(address: str) -> str:
    """ValueError: it is none."""
    if not isinstance(address, str):
        raise ValueError(f"address: must be host:port, got {address!r}")
    if address.startswith(("http://", "https://")):
        rule = (
            "must be host:port of the gRPC API (50051 by default), whose port is not that of HTTP"
        )
        raise ValueError(f"address: {rule}; got {address!r}")
    check_address(address)
    return address


def seconds(name: str, value: object) -> float:
    """Of a client. ValueError: it is no time."""
    found = _number(value)
    if not found >= 0:
        raise ValueError(f"{name}: must be seconds, 0 or more, got {value!r}")
    return found


def _number(value: object) -> float:
    """NaN: it is none."""
    return float(value) if isinstance(value, Real) else math.nan


def _is_header(pair: object) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    name, value = pair
    if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
        return False
    if name.endswith("-bin"):
        return isinstance(value, bytes)
    return isinstance(value, str) and value.isascii() and value.isprintable()


def with_key(
    metadata: Sequence[tuple[str, str]], api_key: str | None
) -> tuple[tuple[str, str], ...]:
    """What goes with every call. ValueError: no header can hold it, or the key."""
    for index, pair in enumerate(metadata):
        # Its value is not shown: it may be a key.
        if not _is_header(pair):
            rule = "must be pairs of a name in small letters and printable ASCII"
            raise ValueError(f"metadata: {rule} (bytes, of a name in -bin), which {index} is not")
    if api_key is None:
        return tuple(metadata)
    if not (isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: must be printable ASCII; is a line end of its file part of it?")
    return (*metadata, ("authorization", f"Bearer {api_key}"))


def deadline_of(timeout_s: object) -> float | None:
    """When a request's time ends, by the monotonic clock. InvalidRequestError: it is no time."""
    if timeout_s is None:
        return None
    found = _number(timeout_s)
    if not found > 0:
        rule = f"timeout_s: must be seconds, more than 0, got {timeout_s!r}"
        raise InvalidRequestError(rule, fields=("timeout_s",))
    return time.monotonic() + min(found, TIMEOUT_S_MAX)


def seconds_left(deadline_s: float | None) -> float | None:
    """The rest of a request's time, for the next call."""
    if deadline_s is None:
        return None
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceededError("the request's time ran out while its service was away or full")
    return left_s
