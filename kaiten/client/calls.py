"""The calls that follow one request, one after another; of either client."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc

from kaiten.client.connection import Lifetime, deadline_of, seconds_left
from kaiten.client.errors import ApiError, RequestCancelledError
from kaiten.client.following import Following
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub


class Calls:
    """At most one is under way. It knows no generation: one that is forgotten ends at once."""

    def __init__(
        self,
        stub: InferenceServiceStub,
        following: Following,
        timeout_s: float | None,
        metadata: Sequence[tuple[str, str]],
        lifetime: Lifetime,
    ) -> None:
        """InvalidRequestError: `timeout_s` is no time."""
        self.following = following
        self.lifetime = lifetime
        self._stub = stub
        self._metadata = metadata
        self._deadline_s = deadline_of(timeout_s)
        self._rpc: Any = None
        self._is_closed = False
        self._wake: Callable[[], object] | None = None

    @property
    def go_on(self) -> bool:
        """The request has not ended, and somebody wants it."""
        return not (self.following.is_done or self._is_closed)

    def next(self) -> Any:
        """The stream of the next call. DeadlineExceededError: no time is left for one.
        RequestCancelledError: the client was closed.
        """
        self._check_client()
        call = self.following.next_call()
        method = self._stub.Generate if isinstance(call, pb.GenerateRequest) else self._stub.Attach
        timeout_s = seconds_left(self._deadline_s)
        try:
            self._rpc = method(call, timeout=timeout_s, metadata=self._metadata)
        # What a channel that is closed raises.
        except (ValueError, grpc.aio.UsageError):
            if not self.lifetime.is_closed:
                raise
            raise RequestCancelledError("the client was closed") from None
        # By another thread, or the handler of a signal, while it was made.
        if self._is_closed:
            self._rpc.cancel()
        return self._rpc

    def wait_s_after(self, error: ApiError | None) -> float:
        """As Following's, and no longer than the request has time. RequestCancelledError: the
        client was closed.
        """
        self._check_client()
        now_s = time.monotonic()
        wait_s = self.following.wait_s_after(error, now_s=now_s)
        return wait_s if self._deadline_s is None else min(wait_s, max(0, self._deadline_s - now_s))

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """For the time of a wait between calls, which `close`, or the client's, ends by `wake`."""
        self._wake = wake
        with self.lifetime.waking(wake):
            if self._is_closed:
                wake()
            yield

    def end(self) -> None:
        """Cancel the call that is under way, if one is."""
        if self._rpc is not None and not self.lifetime.is_forked:
            self._rpc.cancel()

    def close(self) -> None:
        """The same, and make no other."""
        self._is_closed = True
        if self._wake is not None:
            self._wake()
        self.end()

    def _check_client(self) -> None:
        if self.lifetime.is_closed:
            raise RequestCancelledError("the client was closed")
