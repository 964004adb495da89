"""The gRPC door: InferenceService and ModelService over the front.

A delta per token while the client keeps up: a write waits for flow control, and what the journal
brings meanwhile piles up as token ids and goes out as one delta.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

import grpc

from gateway.front import Front
from gateway.generation import Finished, Generation
from gateway.wire import ask_from_proto, event_to_proto, finished_to_proto
from protos.kaiten.v1 import inference_service_pb2 as pb
from protos.kaiten.v1 import inference_service_pb2_grpc as inference_grpc
from protos.kaiten.v1 import model_service_pb2 as model_pb
from protos.kaiten.v1 import model_service_pb2_grpc as model_grpc
from protos.kaiten.v1.common_pb2 import FinishReason, SamplingParams
from protos.kaiten.v1.inference_service_pb2 import Done as DoneMessage
from service_kit.errors import DeadlineExceeded

Context = Any

SERVICE_NAMES: Final = (
    pb.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    model_pb.DESCRIPTOR.services_by_name["ModelService"].full_name,
)


class InferenceServicer(inference_grpc.InferenceServiceServicer):
    """See inference_service.proto, whose comments are the contract."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def Generate(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        ask = ask_from_proto(
            request, timeout_s=context.time_remaining(), traceparent=_traceparent(context)
        )
        generation = await self._front.generate(ask)
        with self._front.following(generation, keep_running=request.keep_running):
            async for events in generation:
                for event in events:
                    message = event_to_proto(event, with_token_ids=request.return_token_ids)
                    yield pb.GenerateResponse(event=message)
        raise_if_late(generation)

    async def Attach(
        self, request: pb.AttachRequest, context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        generation = await self._front.attach(request.request_id, request.positions)
        with self._front.following(generation, keep_running=request.keep_running):
            async for events in generation:
                for event in events:
                    message = event_to_proto(event, with_token_ids=request.return_token_ids)
                    yield pb.AttachResponse(event=message)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        return pb.CancelResponse(was_live=await self._front.cancel(request.request_id))

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: Context
    ) -> pb.GetRequestResponse:
        seen = await self._front.look(request.request_id)
        if seen.done is None:
            state = pb.RequestState.REQUEST_STATE_LIVE
            return pb.GetRequestResponse(request_id=request.request_id, state=state)
        return pb.GetRequestResponse(
            request_id=request.request_id,
            state=pb.RequestState.REQUEST_STATE_FINISHED,
            choices=[finished_to_proto(end) for end in seen.ends],
            done=seen.done,
        )


class ModelServicer(model_grpc.ModelServiceServicer):
    """See model_service.proto."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def ListModels(
        self, request: model_pb.ListModelsRequest, context: Context
    ) -> model_pb.ListModelsResponse:
        return model_pb.ListModelsResponse(models=[model_to_proto(self._front)])


def model_to_proto(front: Front) -> model_pb.Model:
    """The served model as the gateway and the cell's workers know it."""
    card, limits, watch = front.card, front.limits, front.readiness.watch
    defaults = card.defaults
    return model_pb.Model(
        name=card.name,
        architecture=card.architecture,
        dtype=watch.worker.dtype if watch.worker else "",
        vocab_size=limits.vocab_size,
        context_tokens_max=limits.context_tokens_max,
        choices_max=limits.choices_max,
        logprobs_max=limits.logprobs_max,
        sampling_defaults=SamplingParams(
            temperature=defaults.temperature,
            top_k=defaults.top_k,
            top_p=defaults.top_p,
            min_p=defaults.min_p,
            repetition_penalty=defaults.repetition_penalty,
        ),
        workers_ready=watch.record.workers_ready if watch.record else 0,
        eos_token_ids=card.eos_token_ids,
    )


def raise_if_late(generation: Generation) -> None:
    """A request that ran out of time ends as DEADLINE_EXCEEDED, after all its events."""
    ends = [choice.end for choice in generation.choices if choice.end is not None]
    late = FinishReason.FINISH_REASON_DEADLINE_EXCEEDED
    if any(end.reason == late for end in ends):
        raise DeadlineExceeded(late_phase(ends, generation.done_message))


def late_phase(ends: list[Finished], done: DoneMessage | None) -> str:
    """Where the time ran out, from what was done by then."""
    if any(end.output_tokens for end in ends):
        return "decode"
    return "prefill" if done is not None and done.timings.prefill_us else "queued"


def add_to(server: "grpc.aio.Server", front: Front) -> None:
    """Register both services."""
    inference_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(front), server)
    model_grpc.add_ModelServiceServicer_to_server(ModelServicer(front), server)


def _traceparent(context: Context) -> str:
    """The caller's span, if it sent one of a sane length."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str) and len(value) <= 64:
            return value
    return ""
