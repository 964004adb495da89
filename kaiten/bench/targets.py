"""Who is asked: something that streams an answer and says when tokens came. Here: kaiten's gRPC."""

from typing import Final, Protocol
from urllib.parse import urlsplit

import grpc

from kaiten.bench.outcomes import AskError, Ending, OnTokens
from kaiten.bench.workload import Job
from kaiten.client import TLS, AsyncClient
from kaiten.client.connection import with_key
from kaiten.client.errors import ApiError, UnavailableError, from_rpc_error
from kaiten.tls import aio_channel
from kaiten.tls_options import NO_TLS, TlsOptions
from kaiten.v1 import model_service_pb2, model_service_pb2_grpc

LOOK_S: Final = 10.0
# A test of speed does not wait for a lost server to come back: that is an error of the run.
RESUME_S: Final = 1.0


class Target(Protocol):
    """A server under load. `prepare` before the first `ask`, `close` after the last."""

    @property
    def says(self) -> str:
        """What it is and how it is spoken to, for the report."""

    @property
    def vocab_size(self) -> int | None:
        """Token ids must be below; None when the server does not say."""

    @property
    def context_tokens(self) -> int | None:
        """Prompt plus output at most; None when the server does not say."""

    async def prepare(self) -> None: ...

    async def ask(self, job: Job, on_tokens: OnTokens, timeout_s: float) -> Ending:
        """Stream one answer of exactly `job.output_tokens`. AskError when it fails."""

    async def close(self) -> None: ...


class GrpcTarget:
    """kaiten's own protocol: token ids in, exact lengths, positions checked."""

    def __init__(self, address: str, api_key: str | None = None, tls: TLS | None = None) -> None:
        self._address, self._tls = address, tls or False
        self._metadata = with_key((), api_key)
        self._client = AsyncClient(address, resume_s=RESUME_S, api_key=api_key, tls=self._tls)
        self._model = ""
        self.vocab_size: int | None = None
        self.context_tokens: int | None = None

    @property
    def says(self) -> str:
        return f"{self._model} at grpc{'s' * bool(self._tls)}://{self._address}"

    async def prepare(self) -> None:
        try:
            async with aio_channel(self._address, self._tls) as channel:
                stub = model_service_pb2_grpc.ModelServiceStub(channel)
                request = model_service_pb2.ListModelsRequest()
                answer = await stub.ListModels(request, timeout=LOOK_S, metadata=self._metadata)
        except grpc.RpcError as error:
            known = from_rpc_error(error)
            raise AskError(_kind_of(known), f"{self._address}: {known}") from error
        model = answer.models[0]
        self._model = model.name
        self.vocab_size = model.vocab_size or None
        self.context_tokens = model.context_tokens_max or None

    async def ask(self, job: Job, on_tokens: OnTokens, timeout_s: float) -> Ending:
        try:
            async with self._client.generate(
                token_ids=job.prompt,
                max_tokens=job.output_tokens,
                min_tokens=job.output_tokens,
                ignore_eos=True,
                temperature=0.0,
                timeout_s=timeout_s,
            ) as generation:
                async for delta in generation:
                    if delta.token_count:
                        on_tokens(delta.token_count)
                whole = await generation.result()
        except ApiError as error:
            raise AskError(_kind_of(error), str(error)) from error
        choice = whole.choices[0]
        if choice.finish_reason not in ("length", "stop"):
            raise AskError(choice.finish_reason, choice.error)
        return Ending(
            prompt_tokens=whole.usage.prompt_tokens,
            output_tokens=whole.usage.output_tokens,
            cached_tokens=whole.usage.cached_tokens,
        )

    async def close(self) -> None:
        await self._client.close()


def _kind_of(error: ApiError) -> str:
    """`OverloadedError` is "overloaded"."""
    if isinstance(error, UnavailableError):
        return "unavailable"
    return type(error).__name__.removesuffix("Error").lower()


def target_of(
    text: str,
    *,
    model: str = "",
    is_plain: bool = False,
    api_key: str | None = None,
    tls: TlsOptions = NO_TLS,
) -> Target:
    """`http://…` is an OpenAI-compatible server, anything else host:port of a kaiten gateway.
    ValueError says what is wrong with the files of `tls`."""
    if text.startswith(("http://", "https://")):
        from kaiten.bench.openai_target import OpenAITarget

        parts = urlsplit(text)
        path = parts.path.rstrip("/").removesuffix("/v1")
        base_url = f"{parts.scheme}://{parts.netloc}{path}"
        _, trusted = tls.of(base_url)
        return OpenAITarget(base_url, model, is_plain=is_plain, api_key=api_key, tls=trusted)
    address, trusted = tls.of(text)
    return GrpcTarget(address, api_key, trusted)
