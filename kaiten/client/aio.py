"""The client for asyncio: as `kaiten.client.Client`, but awaited. Make it inside a running loop."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from kaiten.client.calls import Calls
from kaiten.client.connection import (
    AT_ONCE,
    AT_ONCE_MAX,
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
from kaiten.client.errors import (
    ApiError,
    InvalidRequestError,
    RequestCancelledError,
    from_rpc_error,
)
from kaiten.client.following import Following
from kaiten.client.request import (
    GenerateOptions,
    Input,
    attach_to,
    id_of,
    request_from,
    request_of_many,
)
from kaiten.client.results import Completion, Delta, RequestStatus, status_from_proto
from kaiten.error_groups import first_alone
from kaiten.tls import TLS, aio_channel
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import inference_service_pb2_grpc, model_service_pb2, model_service_pb2_grpc


class AsyncGeneration:
    """An async iterator over one request's output; `await result()` is the whole."""

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
        return f"AsyncGeneration({self._following!r})"

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while (delta := await self._step()) is None:
            pass
        return delta

    async def _step(self) -> Delta | None:
        self._calls.lifetime.check()
        return await anext(self._steps)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def request_id(self) -> str:
        return self._following.request_id

    async def until_accepted(self) -> None:
        """Return when the service has the request: it is not lost then, whatever dies."""
        while not self._following.is_accepted:
            try:
                await self._step()
            except StopAsyncIteration:
                raise RequestCancelledError("it was closed before it was accepted") from None

    async def result(self) -> Completion:
        """The whole answer (since attaching, if attached), reading what is left of it first."""
        async for _ in self:
            pass
        return self._following.completion()

    async def close(self) -> None:
        """Go away. The service cancels the request, unless it was told to keep it running."""
        self._calls.close()
        # In another task the iteration may be under way; it ends by itself then.
        with suppress(RuntimeError):
            await self._steps.aclose()


async def _follow(calls: Calls) -> AsyncGenerator[Delta | None, None]:
    following = calls.following
    try:
        while calls.go_on:
            error: ApiError | None = None
            try:
                async for answer in calls.next():
                    yield following.feed(answer.event)
            except grpc.RpcError as rpc_error:
                error = from_rpc_error(rpc_error)
            except asyncio.CancelledError:
                # gRPC's word, too, for a call that another task closed, or its client.
                if _is_cancelled():
                    raise
                if calls.go_on:
                    raise RequestCancelledError("the client was closed") from None
            following.raise_if_late(error)
            if calls.go_on:
                await _wait(calls, calls.wait_s_after(error))
    finally:
        calls.end()


async def _wait(calls: Calls, wait_s: float) -> None:
    woken = asyncio.Event()
    with calls.waking(woken.set), suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            await woken.wait()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class AsyncClient:
    """A connection to a gateway, or to several behind one gRPC target."""

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
        """RuntimeError: no loop runs here. ValueError: `address` is none of the gRPC API, a file of
        `tls` cannot be used, no header can hold the key or `metadata`, or a time is none.

        `resume_s`: a lost gateway is looked for so long. `overload_s`: a request that is refused
        because too much is live is offered again so long, each time when the service says.
        `tls`: True trusts the system's authorities.
        """
        self._lifetime = Lifetime(_running_loop())
        self._metadata = with_key(metadata, api_key)
        self._channel = aio_channel(checked_address(address), tls, OPTIONS)
        self._inference = inference_service_pb2_grpc.InferenceServiceStub(self._channel)
        self._models = model_service_pb2_grpc.ModelServiceStub(self._channel)
        self._resume_s = seconds("resume_s", resume_s)
        self._overload_s = seconds("overload_s", overload_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; generations in progress are cancelled."""
        self._lifetime.close()
        if not self._lifetime.is_forked:
            await self._channel.close()

    def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncGeneration:
        """Submit a request and stream its output."""
        return self._generation(request_from(prompt, options), options, self._overload_s)

    async def complete(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Submit a request and return its whole output."""
        async with self.generate(prompt, **options) as generation:
            return await generation.result()

    async def complete_all(
        self,
        prompts: Iterable[Input],
        *,
        at_once: int = AT_ONCE,
        on_done: Callable[[Completion], object] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[Completion]:
        """Submit many with the same options, `at_once` at a time; their outputs, in their order.

        What is refused because too much is live is offered again when the service says so. The
        first that fails otherwise is raised, and cancels the others; so is what `prompts` or
        `on_done` raise.
        """
        if isinstance(prompts, str):
            raise InvalidRequestError("prompts must be several, not one text")
        if not (isinstance(at_once, int) and 1 <= at_once <= AT_ONCE_MAX):
            raise InvalidRequestError(f"at_once must be in [1, {AT_ONCE_MAX}], got {at_once!r}")
        waiting = enumerate(prompts)
        done: dict[int, Completion] = {}

        async def work() -> None:
            for index, one in waiting:
                request = request_of_many(one, options)
                async with self._generation(request, options, math.inf) as generation:
                    done[index] = await generation.result()
                if on_done is not None:
                    on_done(done[index])

        with first_alone(Exception):
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(work())
        return [done[index] for index in range(len(done))]

    async def submit(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> str:
        """Submit a request that goes on without a client; its id, for `attach` and `wait`."""
        options["keep_running"] = True
        async with self.generate(prompt, **options) as generation:
            try:
                await generation.until_accepted()
            except asyncio.CancelledError:
                await generation.close()
                # Under an id of ours nobody could come back to it.
                if not options.get("request_id"):
                    await self._take_back(generation.request_id)
                raise
        return generation.request_id

    async def wait(self, request_id: str, *, timeout_s: float | None = None) -> Completion:
        """The whole output of an accepted request. Giving up waiting does not end it."""
        async with self.attach(request_id, keep_running=True, timeout_s=timeout_s) as generation:
            return await generation.result()

    def attach(
        self,
        request_id: str,
        *,
        positions: Sequence[int] = (),
        return_token_ids: bool = False,
        keep_running: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGeneration:
        """Follow an accepted request, running or finished, from output positions per choice."""
        call = attach_to(
            request_id, positions, return_token_ids=return_token_ids, keep_running=keep_running
        )
        following = Following(attach=call, resume_s=self._resume_s, overload_s=self._overload_s)
        return self._followed(following, timeout_s)

    async def cancel(self, request_id: str) -> bool:
        """Stop a request. False when it had already ended."""
        answer = await self._call(
            self._inference.Cancel, pb.CancelRequest(request_id=id_of(request_id))
        )
        return bool(answer.was_live)

    async def get(self, request_id: str) -> RequestStatus:
        """Look at a request without following it."""
        return status_from_proto(
            await self._call(
                self._inference.GetRequest, pb.GetRequestRequest(request_id=id_of(request_id))
            )
        )

    async def models(self) -> tuple[str, ...]:
        """Names of the models served here."""
        answer = await self._call(self._models.ListModels, model_service_pb2.ListModelsRequest())
        return tuple(model.name for model in answer.models)

    def _generation(
        self, request: pb.GenerateRequest, options: GenerateOptions, overload_s: float
    ) -> AsyncGeneration:
        following = Following(generate=request, resume_s=self._resume_s, overload_s=overload_s)
        return self._followed(following, options.get("timeout_s"))

    def _followed(self, following: Following, timeout_s: float | None) -> AsyncGeneration:
        self._lifetime.check_open()
        return AsyncGeneration(
            self._inference, following, timeout_s, self._metadata, self._lifetime
        )

    async def _take_back(self, request_id: str) -> None:
        request = pb.CancelRequest(request_id=request_id)
        with suppress(ApiError):
            await self._call(self._inference.Cancel, request, timeout_s=LEAVING_S)

    async def _call(
        self, method: Callable[..., Awaitable[Any]], request: Any, *, timeout_s: float = UNARY_S
    ) -> Any:
        self._lifetime.check_open()
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise RequestCancelledError("the client was closed") from None


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("make an AsyncClient inside its running event loop") from None
