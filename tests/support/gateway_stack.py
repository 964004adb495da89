"""A gateway in this process, on free ports, over the real store and a scripted scheduler."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc.status_pb2 import Status
from openai import AsyncOpenAI
from pydantic import SecretStr

from gateway.main import GatewayService
from gateway.settings import GatewaySettings
from gateway.text.model_card import ModelCard
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.common_pb2 import Feature
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from kaiten.v1.model_service_pb2_grpc import ModelServiceStub
from ledger import Ledger, LedgerLimits
from tests.fakes.scripted_scheduler import FEATURES, Script, ScriptedScheduler, echo
from tests.support.tokenizers import write_model_folder

MODEL = "tiny"
WAIT_S = 60.0
# Of bodies that are sent as bytes.
JSON = {"content-type": "application/json"}


@dataclass
class RunningGateway:
    """A started gateway and clients of both its doors."""

    service: GatewayService
    channel: "grpc.aio.Channel"
    openai: AsyncOpenAI

    @property
    def card(self) -> ModelCard:
        return self.service.generation_service.card

    @property
    def inference(self) -> Any:
        return InferenceServiceStub(self.channel)

    @property
    def models(self) -> Any:
        return ModelServiceStub(self.channel)

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.service.http_port}"

    def ids(self, text: str) -> list[int]:
        return list(self.card.tokenizer.encode(text, add_special_tokens=False).ids)


async def until(is_met: Callable[[], bool], what: str = "the condition") -> None:
    """Wait for what another task brings about."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not is_met():  # noqa: ASYNC110 - the conditions are other objects' state
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} was never met") from None


async def _at_the_first_conversation() -> None:
    """Most tests have none. A gateway that is a process has a child before it is ready."""


@asynccontextmanager
async def running_gateway(
    folder: Path, redis_url: str, cell: str, **changes: Any
) -> AsyncIterator[RunningGateway]:
    """Start a gateway and stop it in the end. It need not be ready yet."""
    config = GatewaySettings(
        model=folder,
        served_model_name=MODEL,
        redis_url=SecretStr(redis_url),
        cell=cell,
        grpc_port=0,
        http_port=0,
        **changes,
    )
    service = GatewayService(config)
    if service._template is not None:
        service._template.start = _at_the_first_conversation  # type: ignore[method-assign]
    serving: asyncio.Task[None] | None = None
    try:
        await service.start()
        serving = asyncio.create_task(service.serve())
        address = f"127.0.0.1:{service.grpc_port}"
        url = f"http://127.0.0.1:{service.http_port}/v1"
        async with (
            grpc.aio.insecure_channel(address) as channel,
            AsyncOpenAI(base_url=url, api_key="any", max_retries=0, timeout=WAIT_S) as client,
        ):
            yield RunningGateway(service, channel, client)
    finally:
        try:
            if serving is not None:
                serving.cancel()
                with suppress(asyncio.CancelledError):
                    await serving
        finally:
            await service.stop()


@dataclass
class Stack:
    """A ready gateway and its scripted scheduler."""

    gateway: RunningGateway
    scheduler: ScriptedScheduler
    ledger: Ledger

    def says(self, text: str, *, then_stop: bool = True) -> None:
        """From now on every request is answered with this text."""
        tokens = self.gateway.ids(text)
        stop = self.gateway.card.eos_token_ids[:1] if then_stop else ()
        self.scheduler.script = lambda _record, _choice: iter((*tokens, *stop))

    async def generate(self, **fields: Any) -> list[pb.GenerationEvent]:
        """All events of one Generate call."""
        call = self.gateway.inference.Generate(pb.GenerateRequest(**fields), timeout=WAIT_S)
        return [response.event async for response in call]


@asynccontextmanager
async def running_stack(
    folder: Path,
    redis_url: str,
    cell: str,
    *,
    script: Script = echo,
    tokens_per_step: int = 1,
    step_s: float = 0.0,
    features: Sequence[Feature] = FEATURES,
    **changes: Any,
) -> AsyncIterator[Stack]:
    """Gateway and scheduler, ready to serve."""
    if not (folder / "config.json").exists():
        write_model_folder(folder)
    # The scheduler's and the test's own: who is put aside for long asks again.
    ledger = await Ledger.connect(
        redis_url, cell=cell, limits=LedgerLimits(retry_s=WAIT_S, operation_timeout_s=WAIT_S)
    )
    try:
        await ledger.check()
        async with running_gateway(folder, redis_url, cell, **changes) as gateway:
            scheduler = ScriptedScheduler(
                ledger,
                script=script,
                vocab_size=gateway.card.vocab_size,
                context_tokens_max=gateway.card.context_tokens_max,
                tokens_per_step=tokens_per_step,
                step_s=step_s,
                features=features,
            )
            async with scheduler:
                readiness = gateway.service.generation_service.readiness
                await until(lambda: not readiness.problem, "readiness")
                yield Stack(gateway, scheduler, ledger)
    finally:
        await ledger.close()


def text_of(events: list[pb.GenerationEvent], choice: int = 0) -> str:
    """The text one choice was given."""
    deltas = [event.delta for event in events if event.HasField("delta")]
    return "".join(delta.text for delta in deltas if delta.choice == choice)


def detail(error: "grpc.aio.AioRpcError", kind: Any) -> Any:
    status = Status.FromString(dict(error.trailing_metadata() or ())["grpc-status-details-bin"])
    found = kind()
    assert any(packed.Unpack(found) for packed in status.details)
    return found
