"""A gateway for client tests: a real grpc.aio server whose streams follow a script.

Each Generate or Attach takes the next script: events are sent, an error ends the RPC with its
status, bytes end it as a status with these details, a text as if somebody on the way had ended it,
and an asyncio.Event is set before the stream stands still for good.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from kaiten.v1 import common_pb2, inference_service_pb2_grpc, model_service_pb2_grpc
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import model_service_pb2 as models_pb
from service_kit import grpc_server
from service_kit.errors import KaitenError

Step = pb.GenerationEvent | Exception | bytes | str | asyncio.Event


def accepted(request_id: str = "r") -> pb.GenerationEvent:
    return pb.GenerationEvent(accepted=pb.Accepted(request_id=request_id, prompt_tokens=3))


def delta(position: int, text: str, *, choice: int = 0, ids: Sequence[int] = ()) -> Any:
    """One token per character, so that positions can be read off the text."""
    return pb.GenerationEvent(
        delta=pb.Delta(
            choice=choice, position=position, token_count=len(text), text=text, token_ids=ids
        )
    )


def finished(
    tokens: int, *, choice: int = 0, reason: Any = common_pb2.FINISH_REASON_STOP
) -> pb.GenerationEvent:
    return pb.GenerationEvent(
        finished=pb.ChoiceFinished(choice=choice, reason=reason, output_tokens=tokens)
    )


def done(tokens: int) -> pb.GenerationEvent:
    return pb.GenerationEvent(
        done=pb.Done(
            usage=pb.Usage(prompt_tokens=3, output_tokens=tokens, cached_tokens=1),
            timings=pb.Timings(queue_us=1, prefill_us=2, decode_us=3, preemptions=4),
        )
    )


class ScriptedGateway(
    inference_service_pb2_grpc.InferenceServiceServicer, model_service_pb2_grpc.ModelServiceServicer
):
    """Plays `scripts` in order and keeps every request it got in `calls`."""

    def __init__(self, *scripts: Sequence[Step], port: int = 0) -> None:
        self.scripts = list(scripts)
        self.calls: list[Any] = []
        self.deadlines_s: list[float | None] = []
        self.metadata: list[dict[str, str]] = []
        self.left = asyncio.Event()
        # A stream has ended with an error of its script.
        self.refused = asyncio.Event()
        self.port = port
        self._server = grpc_server.create_server()

    async def __aenter__(self) -> Self:
        inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        model_service_pb2_grpc.add_ModelServiceServicer_to_server(self, self._server)
        self.port = grpc_server.bind(self._server, "127.0.0.1", self.port)
        await self._server.start()
        return self

    async def __aexit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        await self._server.stop(0)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for event in self._play(request, context):
            yield pb.GenerateResponse(event=event)

    async def Attach(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for event in self._play(request, context):
            yield pb.AttachResponse(event=event)

    async def Cancel(self, request: Any, context: Any) -> Any:
        self.calls.append(request)
        self.deadlines_s.append(context.time_remaining())
        return pb.CancelResponse(was_live=True)

    async def GetRequest(self, request: Any, _context: Any) -> Any:
        (answer,) = self.scripts.pop(0)
        if isinstance(answer, KaitenError):
            raise answer
        return answer

    async def ListModels(self, _request: Any, _context: Any) -> Any:
        return models_pb.ListModelsResponse(models=[models_pb.Model(name="mini")])

    async def _play(self, request: Any, context: Any) -> AsyncIterator[pb.GenerationEvent]:
        self.calls.append(request)
        self.deadlines_s.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    self.refused.set()
                    raise step
                if isinstance(step, bytes):
                    details = (("grpc-status-details-bin", step),)
                    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", details)
                elif isinstance(step, str):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, step)
                elif isinstance(step, asyncio.Event):
                    step.set()
                    await asyncio.Event().wait()
                else:
                    yield step
        except (asyncio.CancelledError, GeneratorExit):
            # While it waits here, or while what it yielded is being written.
            self.left.set()
            raise
