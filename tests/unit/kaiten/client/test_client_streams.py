"""Both clients against a real server that plays scripts: results, errors, leaving, resuming."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kaiten.client import AsyncClient, Client, Generation
from kaiten.client.errors import (
    AlreadyExistsError,
    ApiError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
    from_rpc_error,
)
from kaiten.client.following import WAIT_S_MAX, Following
from kaiten.client.results import Completion
from kaiten.local.ports import HeldPort
from kaiten.v1 import common_pb2
from kaiten.v1 import inference_service_pb2 as pb
from kaiten.v1.inference_service_pb2_grpc import InferenceServiceStub
from service_kit import errors
from tests.support.scripted_gateway import ScriptedGateway, Step, accepted, delta, done, finished
from tests.support.tcp_server import tcp_server

WAIT_S = 60.0
WHOLE = [accepted(), delta(0, "abc"), delta(3, "de"), finished(5), done(5)]


def _of_client(options: dict[str, Any]) -> dict[str, Any]:
    """The client's own options, and no others left with it."""
    given = {name: options.pop(name) for name in ("overload_s", "metadata") if name in options}
    return {"resume_s": options.pop("resume_s", WAIT_S)} | given


async def complete_sync(address: str, **options: Any) -> Completion:
    """The sync client, in a thread because the server lives on this loop."""

    def run() -> Completion:
        with Client(address, **_of_client(options)) as client:
            return client.complete(options.pop("prompt", "hi"), **options)

    return await asyncio.wait_for(asyncio.to_thread(run), WAIT_S)


async def complete_async(address: str, **options: Any) -> Completion:
    async with AsyncClient(address, **_of_client(options)) as client:
        call = client.complete(options.pop("prompt", "hi"), **options)
        return await asyncio.wait_for(call, WAIT_S)


Complete = Callable[..., Any]
both = pytest.mark.parametrize("complete", [complete_sync, complete_async])


@both
async def test_a_whole_answer(complete: Complete) -> None:
    async with ScriptedGateway(WHOLE) as gateway:
        result = await complete(gateway.address, request_id="r")
    assert result.request_id == "r"
    assert result.text == "abcde"
    assert (result.choices[0].finish_reason, result.choices[0].output_tokens) == ("stop", 5)
    assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (3, 1)
    assert (result.timings.queue_us, result.timings.preemptions) == (1, 4)


@both
async def test_choices_are_kept_apart(complete: Complete) -> None:
    script = [
        *(accepted(), delta(0, "xy", choice=1, ids=(8, 9)), delta(0, "a", ids=(7,))),
        *(finished(1), finished(2, choice=1, reason=common_pb2.FINISH_REASON_LENGTH), done(3)),
    ]
    async with ScriptedGateway(script) as gateway:
        first, second = (await complete(gateway.address, n=2, return_token_ids=True)).choices
    assert (first.text, first.token_ids, first.finish_reason) == ("a", (7,), "stop")
    assert (second.text, second.token_ids, second.finish_reason) == ("xy", (8, 9), "length")


@both
async def test_options_arrive_as_they_were_given(complete: Complete) -> None:
    async with ScriptedGateway(WHOLE) as gateway:
        await complete(
            gateway.address,
            **{"temperature": 0.0, "seed": 0, "max_tokens": 5, "top_k": None, "stop": ["\n"]},
            **{"logprobs": 0, "stop_token_ids": [2], "keep_running": True, "model": "m"},
        )
        (request,) = gateway.calls
    sampling = request.sampling
    assert (request.text, request.model, request.keep_running) == ("hi", "m", True)
    assert [name for name in ("temperature", "seed", "logprobs") if sampling.HasField(name)] == [
        *("temperature", "seed", "logprobs")
    ]
    assert not sampling.HasField("top_k")
    assert (list(request.stop), list(sampling.stop_token_ids)) == (["\n"], [2])
    assert request.request_id


@both
async def test_token_ids_and_conversations(complete: Complete) -> None:
    async with ScriptedGateway(WHOLE, WHOLE) as gateway:
        await complete(gateway.address, prompt=None, token_ids=[1, 2])
        await complete(gateway.address, prompt=None, messages=[{"role": "user", "content": "hi"}])
        ids, talk = gateway.calls
    assert list(ids.token_ids.ids) == [1, 2]
    assert [(m.role, m.content) for m in talk.conversation.messages] == [("user", "hi")]


@both
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidRequest("n", "must be at least 1"), InvalidRequestError),
        (errors.AlreadyExists("request r"), AlreadyExistsError),
        (errors.DeadlineExceeded("queued"), DeadlineExceededError),
        (errors.Overloaded("queue full", 2.5), OverloadedError),
    ],
)
async def test_errors_are_typed_and_not_retried(
    complete: Complete, error: errors.KaitenError, kind: type[ApiError]
) -> None:
    async with ScriptedGateway([error]) as gateway:
        with pytest.raises(kind) as caught:
            await complete(gateway.address)
        assert len(gateway.calls) == 1
    assert str(caught.value) == str(error)
    assert caught.value.retry_after_s == (2.5 if kind is OverloadedError else None)
    assert caught.value.fields == (("n",) if kind is InvalidRequestError else ())


@both
async def test_details_that_are_none_do_not_hide_the_error(complete: Complete) -> None:
    async with ScriptedGateway([b"\xff a proxy's own words"]) as gateway:
        with pytest.raises(OverloadedError, match="full"):
            await complete(gateway.address)


@both
async def test_more_than_a_message_holds_is_no_overload(complete: Complete) -> None:
    """What gRPC calls exhausted has room at no other time."""
    async with ScriptedGateway() as gateway:
        with pytest.raises(InvalidRequestError, match="too large for one call"):
            await complete(gateway.address, prompt="a" * (4 << 20))
        with pytest.raises(InvalidRequestError, match="too large for one call"):
            await complete(gateway.address, metadata=[("x-long", "a" * (32 << 10))])


@both
async def test_an_end_that_this_client_does_not_know_is_a_typed_error(complete: Complete) -> None:
    newer: Any = 99
    script = [accepted(), delta(0, "abc"), finished(3, reason=newer), done(3)]
    async with ScriptedGateway(script) as gateway:
        with pytest.raises(InternalServerError, match="finish reason 99"):
            await complete(gateway.address)


@both
async def test_a_break_before_acceptance_repeats_the_same_request(complete: Complete) -> None:
    async with ScriptedGateway([errors.Unavailable("restarting", 0.01)], WHOLE) as gateway:
        assert (await complete(gateway.address)).text == "abcde"
        first, second = gateway.calls
    assert first == second


@both
@pytest.mark.parametrize("ends", [[errors.Unavailable("gone", 0.01)], [errors.Cancelled()], []])
async def test_a_break_afterwards_attaches_where_it_was(complete: Complete, ends: Any) -> None:
    """Also when the stream just ends, or is cancelled by a gateway that shuts down."""
    first = [accepted(), delta(0, "ab"), delta(0, "x", choice=1), *ends]
    second = [
        *(accepted(), delta(2, "cde"), finished(5), delta(1, "yz", choice=1)),
        *(finished(3, choice=1), done(8)),
    ]
    async with ScriptedGateway(first, second) as gateway:
        result = await complete(gateway.address, request_id="r", n=2, return_token_ids=True)
        attach = gateway.calls[1]
    assert [choice.text for choice in result.choices] == ["abcde", "xyz"]
    assert isinstance(attach, pb.AttachRequest)
    assert (attach.request_id, list(attach.positions)) == ("r", [2, 1])
    assert attach.return_token_ids is True


@both
async def test_a_request_that_ends_with_its_connection_is_no_answer(complete: Complete) -> None:
    """A gateway that lives takes a broken connection for a client that has left."""
    first = [accepted(), delta(0, "ab")]
    cancelled = finished(3, reason=common_pb2.FINISH_REASON_CANCELLED)
    second = [accepted(), delta(2, "c"), cancelled, done(3)]
    async with ScriptedGateway(first, second) as gateway:
        with pytest.raises(UnavailableError, match="which its gateway took for leaving"):
            await complete(gateway.address)
    async with ScriptedGateway(first, second) as gateway:
        answer = await complete(gateway.address, keep_running=True)
    async with ScriptedGateway([*first, errors.Unavailable("gone", 0.01)], second) as gateway:
        assert await complete(gateway.address, request_id=answer.request_id) == answer
    assert (answer.text, answer.choices[0].finish_reason) == ("abc", "cancelled")


@both
async def test_a_connection_that_breaks_before_acceptance_has_broken_too(
    complete: Complete,
) -> None:
    """And the same request, sent again, is told the end of the first."""
    cancelled = finished(0, reason=common_pb2.FINISH_REASON_CANCELLED)
    second = [accepted(), cancelled, done(0)]
    async with ScriptedGateway(["reset by peer"], second) as gateway:
        with pytest.raises(UnavailableError, match="which its gateway took for leaving"):
            await complete(gateway.address)
        first, again = gateway.calls
    assert first == again


@both
async def test_who_lost_a_gateway_waits_for_room_at_another(complete: Complete) -> None:
    first = [accepted(), delta(0, "ab"), errors.Unavailable("gone", 0.01)]
    full = errors.Overloaded("too many streams", 0.01)
    second = [accepted(), delta(2, "c"), finished(3), done(3)]
    async with ScriptedGateway(first, [full], [full], second) as gateway:
        assert (await complete(gateway.address)).text == "abc"


@both
async def test_no_wait_is_longer_than_the_request_has_time(complete: Complete) -> None:
    full = errors.Overloaded("queue full", 1e6)
    async with ScriptedGateway([full]) as gateway:
        with pytest.raises(DeadlineExceededError, match="while its service was away or full"):
            await complete(gateway.address, timeout_s=0.5, overload_s=math.inf)


def test_a_stream_that_a_proxy_resets_is_a_service_that_is_away() -> None:
    """Its gateway went away; gRPC has several codes for what the proxy says then."""

    class Reset(grpc.RpcError):
        def __init__(self, code: grpc.StatusCode, details: str) -> None:
            self.code, self.details = lambda: code, lambda: details
            self.trailing_metadata = lambda: ()

    said = "Stream removed (RST_STREAM (Received RST_STREAM with error code 2))"
    for code in ("INTERNAL", "UNKNOWN", "RESOURCE_EXHAUSTED", "UNAVAILABLE"):
        assert type(from_rpc_error(Reset(grpc.StatusCode[code], said))) is UnavailableError
    late = Reset(grpc.StatusCode.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)")
    assert type(from_rpc_error(late)) is DeadlineExceededError


@both
async def test_what_comes_again_is_not_handed_out_again(complete: Complete) -> None:
    first = [accepted(), delta(0, "ab"), errors.Unavailable("gone", 0.01)]
    second = [accepted(), delta(0, "ab"), delta(2, "c"), finished(3), done(3)]
    async with ScriptedGateway(first, second) as gateway:
        assert (await complete(gateway.address)).text == "abc"


@both
async def test_an_explained_prompt_is_part_of_the_answer(complete: Complete) -> None:
    """Also when it is told again, by the gateway that takes over before the first delta."""
    told = common_pb2.PromptLogprobs(
        position=1,
        token_count=2,
        logprobs=[-1, -2],
        top_token_ids=[5, 6, 7, 8],
        top_logprobs=[-0.5, -1, -1.5, -2],
    )
    prompt = pb.GenerationEvent(prompt=pb.PromptWithLogprobs(token_ids=[3, 4, 5], logprobs=told))
    first: list[Step] = [accepted(), prompt, errors.Unavailable("gone", 0.01)]
    second = [accepted(), prompt, delta(0, "abc"), finished(3), done(3)]
    async with ScriptedGateway(first, second) as gateway:
        answer = await complete(gateway.address, prompt_logprobs=2, max_tokens=3)
        assert gateway.calls[0].sampling.prompt_logprobs == 2
    assert answer.text == "abc"
    assert answer.prompt.token_ids == (3, 4, 5)
    assert [each.logprob for each in answer.prompt.logprobs] == [-1, -2]
    assert [each.top for each in answer.prompt.logprobs] == [
        ((5, -0.5), (6, -1)),
        ((7, -1.5), (8, -2)),
    ]


@both
async def test_a_hole_is_an_error(complete: Complete) -> None:
    async with ScriptedGateway([accepted(), delta(0, "ab"), delta(3, "d")]) as gateway:
        with pytest.raises(InternalServerError, match="choice 0: expected position 2, got 3"):
            await complete(gateway.address)


@both
async def test_resuming_has_a_limit(complete: Complete) -> None:
    script: list[Step] = [accepted(), errors.Unavailable("gone", 0.01)]
    async with ScriptedGateway(*[script] * 50) as gateway:
        with pytest.raises(UnavailableError, match="gone") as told:
            await complete(gateway.address, resume_s=2.0)
        assert told.value.is_of_service
        assert len(gateway.calls) >= 2


def test_a_gateway_may_be_away_for_a_day() -> None:
    following = Following(attach=pb.AttachRequest(request_id="r"), resume_s=1e6)
    waits_s = [following.wait_s_after(None, now_s=0.0) for _ in range(50_000)]
    assert waits_s[:3] == [0.05, 0.1, 0.2]
    assert set(waits_s[10:]) == {WAIT_S_MAX}


async def test_a_port_of_http_is_told_in_a_sentence() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        await reader.read()

    async with tcp_server(answer) as port:
        with pytest.raises(UnavailableError, match="this port speaks HTTP/1"):
            await complete_async(f"127.0.0.1:{port}", resume_s=0.2)


async def test_nobody_there() -> None:
    with HeldPort() as held, pytest.raises(UnavailableError):
        await complete_async(held.address, resume_s=0.2)


@both
async def test_the_deadline_travels_and_covers_all_calls(complete: Complete) -> None:
    """Were it counted anew for each call, this would end by `resume_s`, as UnavailableError."""
    script: list[Step] = [accepted(), errors.Unavailable("gone", 0.01)]
    async with ScriptedGateway(*[script] * 50) as gateway:
        with pytest.raises(DeadlineExceededError):
            await complete(gateway.address, timeout_s=3.0, resume_s=30.0)
        first, *others = gateway.deadlines_s
    assert first is not None
    assert others


@both
@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
async def test_a_time_without_end_is_not_over(complete: Complete, timeout_s: float) -> None:
    """As gRPC has it, for which it is too long to say."""
    async with ScriptedGateway(WHOLE) as gateway:
        assert (await complete(gateway.address, timeout_s=timeout_s)).text == "abcde"


async def test_no_deadline_unless_asked() -> None:
    async with ScriptedGateway(WHOLE) as gateway:
        await complete_async(gateway.address)
        assert gateway.deadlines_s == [None]


async def test_a_gateway_killed_in_mid_stream_is_survived() -> None:
    """The real thing: the server goes away with its connections, another comes up on its port."""
    standing = asyncio.Event()
    with HeldPort() as held:
        await survive(
            ScriptedGateway([accepted(), delta(0, "ab"), standing], port=held.number), standing
        )


async def survive(first: ScriptedGateway, standing: asyncio.Event) -> None:
    await first.__aenter__()
    async with AsyncClient(first.address) as client:
        generation = client.generate("hi")
        texts = [(await anext(generation)).text]
        await asyncio.wait_for(standing.wait(), WAIT_S)
        await first.__aexit__(None, None, None)
        rest = [delta(2, "c"), finished(3), done(3)]
        async with ScriptedGateway(rest, port=first.port) as second:
            texts += [delta.text async for delta in generation]
            assert (await generation.result()).text == "abc"
    assert texts == ["ab", "c"]
    assert list(second.calls[0].positions) == [2]


async def test_leaving_the_with_cancels_async() -> None:
    async with ScriptedGateway([accepted(), delta(0, "a"), asyncio.Event()]) as gateway:
        async with AsyncClient(gateway.address) as client:
            async with client.generate("hi") as generation:
                async for _ in generation:
                    break
            await asyncio.wait_for(gateway.left.wait(), WAIT_S)
            assert [item async for item in generation] == []
        assert len(gateway.calls) == 1


async def test_what_was_closed_has_no_result() -> None:
    standing = asyncio.Event()
    script: list[Step] = [accepted(), delta(0, "abc"), standing]
    async with ScriptedGateway(script) as gateway, AsyncClient(gateway.address) as client:
        generation = client.generate("hi")
        assert (await asyncio.wait_for(anext(generation), WAIT_S)).text == "abc"
        await generation.close()
        with pytest.raises(RequestCancelledError, match="it was closed before its end"):
            await generation.result()


async def test_leaving_the_with_cancels_sync() -> None:
    def read_one(address: str) -> str:
        with Client(address) as client, client.generate("hi") as generation:
            return next(generation).text

    async with ScriptedGateway([accepted(), delta(0, "a"), asyncio.Event()]) as gateway:
        assert await asyncio.to_thread(read_one, gateway.address) == "a"
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


async def test_who_leaves_while_a_message_is_written_is_noted() -> None:
    """gRPC fails the write then, and drops what yielded the message."""
    more_than_a_window = [delta(at, "a" * 200_000) for at in range(100)]
    async with ScriptedGateway([accepted(), *more_than_a_window]) as gateway:
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            call = InferenceServiceStub(channel).Generate(pb.GenerateRequest())
            await call.read()
            call.cancel()
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


async def test_closing_from_another_thread_ends_the_iteration() -> None:
    loop, received, texts = asyncio.get_running_loop(), asyncio.Event(), list[str]()

    def read(generation: Generation) -> None:
        for item in generation:
            texts.append(item.text)
            loop.call_soon_threadsafe(received.set)

    async with ScriptedGateway([accepted(), delta(0, "a"), asyncio.Event()]) as gateway:
        with Client(gateway.address) as client:
            generation = client.generate("hi")
            reading = asyncio.create_task(asyncio.to_thread(read, generation))
            await asyncio.wait_for(received.wait(), WAIT_S)
            await asyncio.to_thread(generation.close)
            await asyncio.wait_for(reading, WAIT_S)
        assert len(gateway.calls) == 1
    assert texts == ["a"]


async def test_attach_cancel_get_models() -> None:
    finish = pb.ChoiceFinished(reason=common_pb2.FINISH_REASON_LENGTH, output_tokens=5)
    status = pb.GetRequestResponse(
        request_id="r", state=pb.REQUEST_STATE_FINISHED, choices=[finish], done=done(5).done
    )
    live = pb.GetRequestResponse(request_id="r", state=pb.REQUEST_STATE_LIVE)
    tail = [delta(3, "de"), finished(5), done(5)]
    scripts: Any = (tail, [status], [live], [errors.NotFound("request x")])
    async with ScriptedGateway(*scripts) as gateway, AsyncClient(gateway.address) as client:
        attached = client.attach("r", positions=[3])
        assert (await attached.result()).text == "de"
        assert list(gateway.calls[0].positions) == [3]
        ended = await client.get("r")
        assert (ended.is_finished, ended.finish_reasons) == (True, ("length",))
        assert (await client.get("r")).is_finished is False
        with pytest.raises(NotFoundError, match="request x not found"):
            await client.get("x")
        assert await client.cancel("r") is True
        assert await client.models() == ("mini",)


@pytest.mark.parametrize(
    ("prompt", "options", "said"),
    [
        (None, {}, "exactly one of prompt"),
        ("a", {"token_ids": [1]}, "exactly one of prompt"),
        (5, {}, "prompt: cannot be 5: it must be a text"),
        (b"a", {}, "prompt: cannot be b'a': it must be a text"),
        ("a", {"timeout_s": 0}, "timeout_s: must be seconds, more than 0, got 0"),
        ("a", {"timeout_s": math.nan}, "timeout_s: must be seconds, more than 0, got nan"),
        ("a", {"timeout_s": "3"}, "timeout_s: must be seconds, more than 0, got '3'"),
        ("a", {"n": -1}, "n: cannot be -1"),
        ("a", {"request_id": "\ud800"}, "request_id: cannot be '.ud800'"),
        ("a", {"temperature": 10**400}, "temperature: cannot be 1000"),
        ("a", {"temperature": "hot"}, "temperature: cannot be 'hot'"),
        ("a", {"logit_bias": {"a": 1}}, "logit_bias: cannot be {'a': 1}"),
        ("a", {"temprature": 1.0}, "no option 'temprature'; there are token_ids, messages"),
        (None, {"token_ids": [-1]}, r"token_ids: cannot be \[-1\]"),
        (None, {"messages": [{"rolle": "user"}]}, 'messages.0: .* no "rolle" field'),
        (None, {"messages": [{}, {"content": []}]}, "messages.1: cannot be {'content': \\[\\]}"),
        (
            None,
            {"messages": ["hi"]},
            "messages.0: cannot be 'hi': a message is a mapping, with role",
        ),
        (None, {"messages": [{"content": [{"type": "text"}]}]}, "content must be a text"),
        (None, {"messages": [{"tool_calls": [{"id": 1}]}]}, "id must be a text"),
        (None, {"messages": [{"tool_calls": ["a"]}]}, "a tool call is a mapping, with id"),
        (None, {"messages": "hi"}, "messages must be several, each with role and content"),
        (None, {"messages": {"role": "user"}}, "messages must be several"),
    ],
)
def test_what_cannot_be_said_is_refused_here(prompt: Any, options: Any, said: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequestError, match=said):
        client.generate(prompt, **options)


def test_every_code_has_a_class() -> None:
    """Codes without a row are faults of the service, and only those that mean that."""
    from kaiten.client.errors import KINDS

    unmapped = {code.name for code in grpc.StatusCode} - {code.name for code in KINDS}
    assert unmapped == {"OK", "UNKNOWN", "INTERNAL", "ABORTED"}
