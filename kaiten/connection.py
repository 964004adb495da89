"""What both clients share: where to connect, with which options, for how long."""

import time
from typing import Final

from kaiten.errors import DeadlineExceededError

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
# How long a lost gateway is looked for before UnavailableError.
RESUME_S: Final = 30.0
UNARY_S: Final = 10.0
OPTIONS: Final = (
    ("grpc.max_receive_message_length", 16 << 20),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC's own second-long first wait would be most of a gateway's restart.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def seconds_left(deadline_s: float | None) -> float | None:
    """The rest of a request's time, for the next call."""
    if deadline_s is None:
        return None
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceededError("the request's time ran out while its service was away")
    return left_s
