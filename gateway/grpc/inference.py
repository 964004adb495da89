"""The gRPC door: InferenceService and ModelService over the generation service.

A delta per token while the client keeps up: a write waits for flow control, and what the journal
brings meanwhile piles up as token ids and goes out as one delta.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final

import grpc

from gateway.grpc.convert import (
    ask_from_proto,
    detokenize_from_proto,
    error_to_proto,
    finished_to_proto,
    tokenize_from_proto,
    write_event,
)
from gateway.requests.generation_service import GenerationService
from gateway.requests.merge import interleaved
from gateway.requests.stream import Finished, Generation
from gateway.requests.validation import TooMany
from gateway.tenants import AUTHORIZATION_CHARS_MAX, Keyring, Tenant
from gateway.values.generation_request import GenerationRequest
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1 import inference_service_pb2_grpc as inference_grpc
from kaiten.v1 import model_service_pb2 as model_pb
from kaiten.v1 import model_service_pb2_grpc as model_grpc
from kaiten.v1.common_pb2 import FinishReason, SamplingParams
from kaiten.v1.inference_service_pb2 import Done as DoneMessage
from service_kit.errors import DeadlineExceeded, InvalidRequest, KaitenError

Context = Any
# Between the end of a request and its client's deadline.
FAREWELL_SHARE: Final = 0.1
FAREWELL_S_MAX: Final = 0.2
# The scheduler is given this long to end a request that has a deadline of ours.
GRACE_S: Final = 1.0

SERVICE_NAMES: Final = (
    pb.DESCRIPTOR.services_by_name["InferenceService"].full_name,
    model_pb.DESCRIPTOR.services_by_name["ModelService"].full_name,
)


class InferenceServicer(inference_grpc.InferenceServiceServicer):
    """See inference_service.proto, whose comments are the contract."""

    def __init__(self, service: GenerationService, keyring: Keyring, batch_max: int) -> None:
        self._service = service
        self._keyring = keyring
        self._batch_max = batch_max

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        tenant = await _tenant(self._keyring, context)
        generation = await self._service.generate(_generation_request(request, context), tenant)
        await self._follow(generation, request, context, pb.GenerateResponse)

    async def GenerateBatch(
        self, request: pb.GenerateBatchRequest, context: Context
    ) -> AsyncIterator[pb.GenerateBatchResponse]:
        tenant = await _tenant(self._keyring, context)
        requests = request.requests
        if not requests:
            raise InvalidRequest("requests", "must hold at least one request")
        if len(requests) > self._batch_max:
            raise TooMany("requests", self._batch_max, len(requests), "requests")

        # Accepted in the order of the batch, while those before run already.
        opening = asyncio.Lock()
        streams = [self._one_of_batch(each, context, tenant, opening) for each in requests]
        async with AsyncExitStack() as held:
            for stream in streams:
                held.push_async_callback(stream.aclose)
            told = await held.enter_async_context(aclosing(interleaved(streams)))
            async for which, answers in told:
                for answer in answers:
                    answer.index = which
                    yield answer

    async def _one_of_batch(
        self, request: pb.GenerateRequest, context: Context, tenant: Tenant, opening: asyncio.Lock
    ) -> AsyncGenerator[list[pb.GenerateBatchResponse], None]:
        """Accepted, refused and ended on its own: an error is its last answer."""
        try:
            async with opening:
                generation = await self._service.generate(
                    _generation_request(request, context), tenant
                )
            with self._service.following(generation):
                async for events in generation:
                    answers = [pb.GenerateBatchResponse() for _ in events]
                    for answer, event in zip(answers, events, strict=True):
                        with_ids = request.return_token_ids
                        write_event(answer.event, event, with_token_ids=with_ids)
                    yield answers
            raise_if_late(generation)
        except KaitenError as error:
            yield [pb.GenerateBatchResponse(error=error_to_proto(error))]

    async def Attach(self, request: pb.AttachRequest, context: Context) -> None:
        generation = await self._service.attach(
            request.request_id,
            await _tenant(self._keyring, context),
            request.positions,
            cursors=request.cursors,
            with_cursors=request.return_cursors,
            keep_running=request.keep_running,
        )
        await self._follow(generation, request, context, pb.AttachResponse)

    async def _follow(
        self,
        generation: Generation,
        request: pb.GenerateRequest | pb.AttachRequest,
        context: Context,
        response_of: type[pb.GenerateResponse | pb.AttachResponse],
    ) -> None:
        with_ids = request.return_token_ids
        with self._service.following(generation):
            async for events in generation:
                for event in events:
                    response = response_of()
                    write_event(response.event, event, with_token_ids=with_ids)
                    await context.write(response)
        raise_if_late(generation)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        tenant = await _tenant(self._keyring, context)
        return pb.CancelResponse(was_live=await self._service.cancel(request.request_id, tenant))

    async def GetRequest(
        self, request: pb.GetRequestRequest, context: Context
    ) -> pb.GetRequestResponse:
        status = await self._service.status(
            request.request_id, await _tenant(self._keyring, context)
        )
        if status.replay is None:
            return pb.GetRequestResponse(
                request_id=request.request_id,
                state=pb.RequestState.REQUEST_STATE_LIVE,
                queue_position=status.queue.position,
                queue_reason=status.queue.reason,
            )
        ends, done = status.replay.ends()
        return pb.GetRequestResponse(
            request_id=request.request_id,
            state=pb.RequestState.REQUEST_STATE_FINISHED,
            choices=[finished_to_proto(end) for end in ends],
            done=done,
        )

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.ExplainResponse:
        tenant = await _tenant(self._keyring, context)
        told = await self._service.explain(request.request_id, tenant, request.tenant)
        choices, trace_id = told
        return pb.ExplainResponse(choices=choices, trace_id=trace_id)


class ModelServicer(model_grpc.ModelServiceServicer):
    """See model_service.proto."""

    def __init__(self, service: GenerationService, keyring: Keyring) -> None:
        self._service = service
        self._keyring = keyring

    async def ListModels(
        self, request: model_pb.ListModelsRequest, context: Context
    ) -> model_pb.ListModelsResponse:
        await _tenant(self._keyring, context)
        return model_pb.ListModelsResponse(models=[model_to_proto(self._service)])

    async def Tokenize(
        self, request: model_pb.TokenizeRequest, context: Context
    ) -> model_pb.TokenizeResponse:
        tenant = await _tenant(self._keyring, context)
        token_ids = await self._service.tokenize(tokenize_from_proto(request), tenant)
        return model_pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, request: model_pb.DetokenizeRequest, context: Context
    ) -> model_pb.DetokenizeResponse:
        tenant = await _tenant(self._keyring, context)
        text = await self._service.detokenize(detokenize_from_proto(request), tenant, "token_ids")
        return model_pb.DetokenizeResponse(text=text)


def model_to_proto(service: GenerationService) -> model_pb.Model:
    """The served model as the gateway and the cell's workers know it."""
    card, limits, watch = service.card, service.limits, service.readiness.watch
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
    if reasons := [end.error for end in ends if end.reason == late]:
        raise DeadlineExceeded(late_phase(ends, generation.done_message), reasons[0])


def late_phase(ends: list[Finished], done: DoneMessage | None) -> str:
    """Where the time ran out, from what was done by then."""
    if any(end.output_tokens for end in ends):
        return "decode"
    return "prefill" if done is not None and done.timings.prefill_us else "queue"


def add_to(
    server: "grpc.aio.Server", service: GenerationService, keyring: Keyring, *, batch_max: int
) -> None:
    """Register both services."""
    inference_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(service, keyring, batch_max), server
    )
    model_grpc.add_ModelServiceServicer_to_server(ModelServicer(service, keyring), server)


def _generation_request(request: pb.GenerateRequest, context: Context) -> GenerationRequest:
    """With the call's deadline, less a little: the client's own clock ends the call at the
    deadline, and then nobody could tell it where the time went."""
    left_s = context.time_remaining()
    margin_s = 0.0 if left_s is None else min(FAREWELL_S_MAX, left_s * FAREWELL_SHARE)
    return ask_from_proto(
        request,
        timeout_s=None if left_s is None else max(0.0, left_s - margin_s),
        grace_s=GRACE_S if left_s is None else margin_s / 2,
        traceparent=metadata(context, "traceparent", 64),
    )


async def _tenant(keyring: Keyring, context: Context) -> Tenant:
    """Who calls. Every method asks, before anything else."""
    authorization = metadata(context, "authorization", AUTHORIZATION_CHARS_MAX)
    return await keyring.admit(authorization, context.peer())


def metadata(context: Context, name: str, chars_max: int) -> str:
    """A metadata value of a sane length, or nothing."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str) and len(value) <= chars_max:
            return value
    return ""
