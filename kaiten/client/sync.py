"""The typed Python client.

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="")

A generation survives the loss of its gateway: it attaches again, at any gateway behind the address,
from the position it had reached. Leaving a `with` around it, or closing it, cancels the request.
"""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from kaiten.client.aio import AsyncClient, AsyncGeneration
from kaiten.client.connection import (
    DEFAULT_ADDRESS,
    OPTIONS,
    RESUME_S,
    UNARY_S,
    seconds_left,
    with_key,
)
from kaiten.client.errors import ApiError, from_rpc_error
from kaiten.client.following import Following
from kaiten.client.request import GenerateOptions, request_from
from kaiten.client.results import Completion, Delta, RequestStatus, status_from_proto
from kaiten.tls import TLS, channel
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import inference_service_pb2_grpc, model_service_pb2, model_service_pb2_grpc

__all__ = ["AsyncClient", "AsyncGeneration", "Client", "Generation"]


class Generation:
    """An iterator over one request's output; afterwards `result` is the whole."""

    def __init__(
        self,
        stub: inference_service_pb2_grpc.InferenceServiceStub,
        following: Following,
        timeout_s: float | None,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        self._stub = stub
        self._following = following
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._metadata = metadata
        self._rpc: Any = None
        self._is_closed = False
        self._deltas = self._follow()

    def __repr__(self) -> str:
        return f"Generation({self._following!r})"

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        return next(self._deltas)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    @property
    def request_id(self) -> str:
        return self._following.request_id

    @property
    def result(self) -> Completion:
        """The whole answer (since attaching, if attached), reading what is left of it first."""
        for _ in self:
            pass
        return self._following.completion()

    def close(self) -> None:
        """Go away. The service cancels the request, unless it was told to keep it running."""
        self._is_closed = True
        if self._rpc is not None:
            self._rpc.cancel()
        # From another thread the iteration may be under way; it ends by itself then.
        with suppress(ValueError):
            self._deltas.close()

    def _follow(self) -> Generator[Delta, None, None]:
        following = self._following
        while not following.is_done and not self._is_closed:
            error: ApiError | None = None
            try:
                self._rpc = self._open()
                for answer in self._rpc:
                    if (delta := following.feed(answer.event)) is not None:
                        yield delta
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            if not following.is_done and not self._is_closed:
                time.sleep(following.wait_s_after(error, now_s=time.monotonic()))

    def _open(self) -> Any:
        call = self._following.next_call()
        method = self._stub.Generate if isinstance(call, pb.GenerateRequest) else self._stub.Attach
        return method(call, timeout=seconds_left(self._deadline_s), metadata=self._metadata)


class Client:
    """A connection to a gateway, or to several behind one gRPC target. Safe to share by threads."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        resume_s: float = RESUME_S,
        api_key: str | None = None,
        tls: TLS | bool = False,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`tls`: True trusts the system's authorities. ValueError: a file of it cannot be read."""
        self._channel = channel(address, tls, OPTIONS)
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._resume_s = resume_s
        self._metadata = with_key(metadata, api_key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; generations in progress are cancelled."""
        self._channel.close()

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Submit a request and stream its output."""
        following = Following(generate=request_from(prompt, options), resume_s=self._resume_s)
        return Generation(self._inference, following, options.get("timeout_s"), self._metadata)

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """Submit a request and return its whole output."""
        with self.generate(prompt, **options) as generation:
            return generation.result

    def attach(
        self,
        request_id: str,
        *,
        positions: Sequence[int] = (),
        return_token_ids: bool = False,
        keep_running: bool = False,
        timeout_s: float | None = None,
    ) -> Generation:
        """Follow an accepted request, running or finished, from output positions per choice."""
        call = pb.AttachRequest(
            request_id=request_id,
            positions=positions,
            return_token_ids=return_token_ids,
            keep_running=keep_running,
        )
        following = Following(attach=call, resume_s=self._resume_s)
        return Generation(self._inference, following, timeout_s, self._metadata)

    def cancel(self, request_id: str) -> bool:
        """Stop a request. False when it had already ended."""
        answer = self._call(self._inference.Cancel, pb.CancelRequest(request_id=request_id))
        return bool(answer.was_live)

    def get(self, request_id: str) -> RequestStatus:
        """Look at a request without following it."""
        return status_from_proto(
            self._call(self._inference.GetRequest, pb.GetRequestRequest(request_id=request_id))
        )

    def models(self) -> tuple[str, ...]:
        """Names of the models served here."""
        answer = self._call(self._models.ListModels, model_service_pb2.ListModelsRequest())
        return tuple(model.name for model in answer.models)

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=UNARY_S, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
