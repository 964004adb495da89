"""The typed Python client.

    with Client("127.0.0.1:50051") as client:
        for delta in client.generate("Once upon a time", max_tokens=64):
            print(delta.text, end="")

A generation survives the loss of its gateway: it attaches again, at any gateway behind the address,
from the position it had reached. Leaving a `with` around it, closing or forgetting it cancels the
request.
"""

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from kaiten.client.aio import AsyncClient, AsyncGeneration
from kaiten.client.calls import Calls
from kaiten.client.connection import (
    AT_ONCE,
    DEFAULT_ADDRESS,
    LEAVING_S,
    OPTIONS,
    RESUME_S,
    UNARY_S,
    Lifetime,
    checked_address,
    seconds,
    with_key,
)
from kaiten.client.errors import ApiError, RequestCancelledError, from_rpc_error
from kaiten.client.following import Following
from kaiten.client.request import GenerateOptions, Input, attach_to, id_of, request_from
from kaiten.client.results import Completion, Delta, RequestStatus, status_from_proto
from kaiten.loop_thread import LoopThread
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
        lifetime: Lifetime,
    ) -> None:
        self._following = following
        self._calls = Calls(stub, following, timeout_s, metadata, lifetime)
        self._steps = _follow(self._calls)

    def __repr__(self) -> str:
        return f"Generation({self._following!r})"

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        while (delta := self._step()) is None:
            pass
        return delta

    def _step(self) -> Delta | None:
        self._calls.lifetime.check()
        return next(self._steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def request_id(self) -> str:
        return self._following.request_id

    def until_accepted(self) -> None:
        """Return when the service has the request: it is not lost then, whatever dies."""
        while not self._following.is_accepted:
            try:
                self._step()
            except StopIteration:
                raise RequestCancelledError("it was closed before it was accepted") from None

    @property
    def result(self) -> Completion:
        """The whole answer (since attaching, if attached), reading what is left of it first."""
        for _ in self:
            pass
        return self._following.completion()

    def close(self) -> None:
        """Go away. The service cancels the request, unless it was told to keep it running."""
        self._calls.close()
        # From another thread the iteration may be under way; it ends by itself then.
        with suppress(ValueError):
            self._steps.close()


def _follow(calls: Calls) -> Generator[Delta | None, None, None]:
    following = calls.following
    try:
        while calls.go_on:
            error: ApiError | None = None
            try:
                for answer in calls.next():
                    yield following.feed(answer.event)
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            following.raise_if_late(error)
            if calls.go_on:
                _wait(calls, calls.wait_s_after(error))
    finally:
        calls.end()


def _wait(calls: Calls, wait_s: float) -> None:
    # Closed by a handler of a signal, too, in this very thread: an Event would have locked it out.
    woken = SimpleQueue[None]()
    with calls.waking(partial(woken.put, None)), suppress(Empty):
        woken.get(timeout=wait_s)


class Client:
    """A connection to a gateway, or to several behind one gRPC target. Safe to share by threads.

    Not by forks: those are told, and make one of their own.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        resume_s: float = RESUME_S,
        overload_s: float = 0.0,
        api_key: str | None = None,
        tls: TLS | bool = False,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> None:
        """ValueError: `address` is none of the gRPC API, a file of `tls` cannot be used, no header
        can hold the key or `metadata`, or a time is none.

        `resume_s`: a lost gateway is looked for so long. `overload_s`: a request that is refused
        because too much is live is offered again so long, each time when the service says.
        `tls`: True trusts the system's authorities.
        """
        self._lifetime = Lifetime()
        self._metadata = with_key(metadata, api_key)
        self._channel = channel(checked_address(address), tls, OPTIONS)
        self._aio = partial(
            AsyncClient, address, resume_s=resume_s, api_key=api_key, tls=tls, metadata=metadata
        )
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._resume_s = seconds("resume_s", resume_s)
        self._overload_s = seconds("overload_s", overload_s)

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
        self._lifetime.close()
        # Of a fork nobody waits for an answer, and there is nobody to close it.
        if not self._lifetime.is_forked:
            self._channel.close()

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Generation:
        """Submit a request and stream its output."""
        return self._generation(request_from(prompt, options), options, self._overload_s)

    def complete(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """Submit a request and return its whole output."""
        with self.generate(prompt, **options) as generation:
            return generation.result

    def complete_all(
        self,
        prompts: Iterable[Input],
        *,
        at_once: int = AT_ONCE,
        on_done: Callable[[Completion], object] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Submit many with the same options, `at_once` at a time; their outputs, in their order.

        What is refused because too much is live is offered again when the service says so. The
        first that fails otherwise is raised, and cancels the others. `prompts` is read, and
        `on_done` called, in another thread.
        """
        self._lifetime.check_open()

        async def complete() -> list[Completion]:
            async with self._aio() as client:
                loop = asyncio.get_running_loop()
                with self._lifetime.waking(
                    lambda: asyncio.run_coroutine_threadsafe(client.close(), loop)
                ):
                    return await client.complete_all(
                        prompts, at_once=at_once, on_done=on_done, **options
                    )

        # Ours may be a thread with a loop that runs: a notebook's.
        with LoopThread("kaiten-client") as loop:
            return loop.call(complete())

    def submit(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> str:
        """Submit a request that goes on without a client; its id, for `attach` and `wait`."""
        options["keep_running"] = True
        with self.generate(prompt, **options) as generation:
            try:
                generation.until_accepted()
            except (KeyboardInterrupt, SystemExit):
                generation.close()
                # Under an id of ours nobody could come back to it.
                if not options.get("request_id"):
                    self._take_back(generation.request_id)
                raise
        return generation.request_id

    def wait(self, request_id: str, *, timeout_s: float | None = None) -> Completion:
        """The whole output of an accepted request. Giving up waiting does not end it."""
        with self.attach(request_id, keep_running=True, timeout_s=timeout_s) as generation:
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
        call = attach_to(
            request_id, positions, return_token_ids=return_token_ids, keep_running=keep_running
        )
        following = Following(attach=call, resume_s=self._resume_s, overload_s=self._overload_s)
        return self._followed(following, timeout_s)

    def cancel(self, request_id: str) -> bool:
        """Stop a request. False when it had already ended."""
        answer = self._call(self._inference.Cancel, pb.CancelRequest(request_id=id_of(request_id)))
        return bool(answer.was_live)

    def get(self, request_id: str) -> RequestStatus:
        """Look at a request without following it."""
        return status_from_proto(
            self._call(
                self._inference.GetRequest, pb.GetRequestRequest(request_id=id_of(request_id))
            )
        )

    def models(self) -> tuple[str, ...]:
        """Names of the models served here."""
        answer = self._call(self._models.ListModels, model_service_pb2.ListModelsRequest())
        return tuple(model.name for model in answer.models)

    def _generation(
        self, request: pb.GenerateRequest, options: GenerateOptions, overload_s: float
    ) -> Generation:
        following = Following(generate=request, resume_s=self._resume_s, overload_s=overload_s)
        return self._followed(following, options.get("timeout_s"))

    def _followed(self, following: Following, timeout_s: float | None) -> Generation:
        self._lifetime.check_open()
        return Generation(self._inference, following, timeout_s, self._metadata, self._lifetime)

    def _take_back(self, request_id: str) -> None:
        request = pb.CancelRequest(request_id=request_id)
        with suppress(ApiError):
            self._call(self._inference.Cancel, request, timeout_s=LEAVING_S)

    def _call(self, method: Callable[..., Any], request: Any, *, timeout_s: float = UNARY_S) -> Any:
        self._lifetime.check_open()
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
