"""Many prompts at once, requests that go on alone, and a service that says when to come again."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from kaiten.client import AsyncClient, Client, Generation, aio, sync
from kaiten.client.connection import UNARY_S
from kaiten.client.errors import InvalidRequestError, OverloadedError, UnavailableError
from kaiten.client.following import Following
from kaiten.client.results import Completion
from kaiten.local.ports import HeldPort
from kaiten.loop_thread import LoopThread
from kaiten.v1 import inference_service_pb2 as pb
from service_kit import errors
from tests.support.scripted_gateway import ScriptedGateway, accepted, delta, done, finished

WAIT_S = 60.0
# Longer than any other call of one answer, to tell it apart.
LEAVING_S = 6 * UNARY_S


def whole(text: str) -> list[pb.GenerationEvent]:
    return [accepted(), delta(0, text), finished(len(text)), done(len(text))]


async def all_sync(address: str, prompts: Any, **options: Any) -> list[Completion]:
    """The sync client, in a thread because the server lives on this loop."""

    def run() -> list[Completion]:
        with Client(address) as client:
            return client.complete_all(prompts, **options)

    return await asyncio.wait_for(asyncio.to_thread(run), WAIT_S)


async def all_async(address: str, prompts: Any, **options: Any) -> list[Completion]:
    async with AsyncClient(address) as client:
        return await asyncio.wait_for(client.complete_all(prompts, **options), WAIT_S)


CompleteAll = Callable[..., Awaitable[list[Completion]]]
both = pytest.mark.parametrize("complete_all", [all_sync, all_async])


@both
async def test_many_come_back_in_their_order(complete_all: CompleteAll) -> None:
    """One at a time here: the scripts are played in the order of the calls."""
    seen: list[Completion] = []
    prompts: Sequence[Any] = ["hi", [1, 2], [{"role": "user", "content": "hello"}]]
    async with ScriptedGateway(whole("a"), whole("bc"), whole("d")) as gateway:
        answers = await complete_all(
            gateway.address, iter(prompts), at_once=1, on_done=seen.append, max_tokens=7
        )
        text, ids, talk = gateway.calls
    assert [answer.text for answer in answers] == ["a", "bc", "d"]
    assert seen == answers
    assert (text.text, list(ids.token_ids.ids)) == ("hi", [1, 2])
    assert talk.conversation.messages[0].content == "hello"
    assert {call.sampling.max_tokens for call in gateway.calls} == {7}
    assert len({call.request_id for call in gateway.calls}) == 3


async def test_so_many_are_under_way_and_no_more() -> None:
    """Each stands still until the test has seen it."""
    standing = [asyncio.Event() for _ in range(5)]
    scripts: Any = [[accepted(), event] for event in standing]
    async with ScriptedGateway(*scripts) as gateway, AsyncClient(gateway.address) as client:
        asking = asyncio.create_task(client.complete_all(["hi"] * 5, at_once=3))
        for event in standing[:3]:
            await asyncio.wait_for(event.wait(), WAIT_S)
        assert len(gateway.calls) == 3
        asking.cancel()
        await asyncio.wait([asking], timeout=WAIT_S)
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


@both
async def test_what_is_refused_as_too_much_is_offered_again(complete_all: CompleteAll) -> None:
    full = errors.Overloaded("queue full", 0.01)
    async with ScriptedGateway([full], [full], whole("a")) as gateway:
        (answer,) = await complete_all(gateway.address, ["hi"])
        first, second, third = gateway.calls
    assert answer.text == "a"
    assert first == second == third


@both
async def test_the_first_that_fails_is_raised_and_ends_the_others(
    complete_all: CompleteAll,
) -> None:
    standing = asyncio.Event()
    wrong = errors.InvalidRequest("n", "must be at least 1")
    async with ScriptedGateway([accepted(), standing], [wrong]) as gateway:
        with pytest.raises(InvalidRequestError, match="n: must be at least 1"):
            await complete_all(gateway.address, ["hi", "hi"], at_once=2)
        await asyncio.wait_for(gateway.left.wait(), WAIT_S)


@both
@pytest.mark.parametrize(
    ("prompts", "options", "said"),
    [
        ("hi", {}, "prompts must be several"),
        (["hi"], {"at_once": 0}, r"at_once must be in \[1, 4096\], got 0"),
        (["hi"], {"at_once": 10**9}, r"at_once must be in \[1, 4096\], got 1000000000"),
        (["hi"], {"request_id": "r"}, "request_id is of one request"),
        (["hi"], {"messages": []}, "messages is of one request"),
        ([1, 2, 3], {}, "a prompt must be a text, token ids or messages, got 1"),
        ([{"prompt": "hi"}], {}, "a prompt must be a text, .* got {'prompt': 'hi'}"),
    ],
)
async def test_what_many_cannot_be_asked(
    complete_all: CompleteAll, prompts: Any, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        await complete_all("127.0.0.1:1", prompts, **options)


@both
async def test_what_its_caller_raises_is_raised(complete_all: CompleteAll) -> None:
    """As it is, and not as one of a group."""

    def prompts() -> Iterator[str]:
        yield "hi"
        raise LookupError("no more")

    def count(_completion: Completion) -> None:
        raise LookupError("it does not count")

    async with ScriptedGateway(whole("a"), whole("a")) as gateway:
        with pytest.raises(LookupError, match="no more"):
            await complete_all(gateway.address, prompts())
    async with ScriptedGateway(whole("a")) as gateway:
        with pytest.raises(LookupError, match="it does not count"):
            await complete_all(gateway.address, ["hi"], on_done=count)


async def test_a_request_that_goes_on_alone() -> None:
    """Submitted, left once it is accepted, and read whole later."""
    async with ScriptedGateway([accepted(), asyncio.Event()], whole("abc")) as gateway:
        async with AsyncClient(gateway.address) as client:
            request_id = await client.submit("hi", request_id="r")
            answer = await client.wait(request_id)
        submitted, attached = gateway.calls
    assert (request_id, answer.text) == ("r", "abc")
    assert (submitted.keep_running, attached.keep_running) == (True, True)
    assert isinstance(attached, pb.AttachRequest)


async def test_a_request_that_goes_on_alone_sync() -> None:
    def run(address: str) -> str:
        with Client(address) as client:
            return client.wait(client.submit("hi")).text

    async with ScriptedGateway([accepted(), asyncio.Event()], whole("abc")) as gateway:
        assert await asyncio.to_thread(run, gateway.address) == "abc"
        assert gateway.calls[0].keep_running is True


@pytest.mark.parametrize("own_id", ["", "r"])
async def test_who_is_interrupted_while_it_submits_leaves_nothing_that_nobody_can_name(
    own_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under an id of its own it may come back to it. It is kept no longer than said for that."""
    monkeypatch.setattr(aio, "LEAVING_S", LEAVING_S)
    standing = asyncio.Event()
    async with ScriptedGateway([standing]) as gateway, AsyncClient(gateway.address) as client:
        submitting = asyncio.create_task(client.submit("hi", request_id=own_id))
        await asyncio.wait_for(standing.wait(), WAIT_S)
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        submitted, *cancelled = gateway.calls
        assert [each.request_id for each in cancelled] == [submitted.request_id] * (not own_id)
        assert submitted.keep_running
        assert [(each or 0) > UNARY_S for each in gateway.deadlines_s[1:]] == [True] * (not own_id)


@pytest.mark.parametrize("own_id", ["", "r"])
async def test_who_is_interrupted_while_it_submits_leaves_nothing_that_nobody_can_name_sync(
    own_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(generation: Generation) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Generation, "until_accepted", interrupted)
    monkeypatch.setattr(sync, "LEAVING_S", LEAVING_S)

    def submit(address: str) -> None:
        with Client(address) as client, pytest.raises(KeyboardInterrupt):
            client.submit("hi", request_id=own_id)

    async with ScriptedGateway() as gateway:
        await asyncio.to_thread(submit, gateway.address)
        assert len(gateway.calls) == (not own_id)
        assert [(each or 0) > UNARY_S for each in gateway.deadlines_s] == [True] * (not own_id)
    with HeldPort() as nobody:
        await asyncio.to_thread(submit, nobody.address)


async def test_what_is_not_accepted_was_not_submitted() -> None:
    refused = errors.InvalidRequest("n", "must be at least 1")
    async with ScriptedGateway([refused]) as gateway, AsyncClient(gateway.address) as client:
        with pytest.raises(InvalidRequestError):
            await client.submit("hi")


async def test_who_comes_back_waits_for_room_too() -> None:
    full = errors.Overloaded("too many streams", 0.01)
    async with ScriptedGateway([full], whole("a"), [full], whole("b")) as gateway:
        async with AsyncClient(gateway.address, overload_s=WAIT_S) as client:
            assert (await client.wait("r")).text == "a"

        def wait() -> str:
            with Client(gateway.address, overload_s=WAIT_S) as client:
                return client.wait("r").text

        assert await asyncio.to_thread(wait) == "b"


def test_room_is_waited_for_as_long_as_the_service_says_and_we_may() -> None:
    following = Following(
        generate=pb.GenerateRequest(request_id="r"), resume_s=0.0, overload_s=10.0
    )
    full = OverloadedError("full", retry_after_s=4.0)
    assert following.wait_s_after(full, now_s=100.0) == 4.0
    assert following.wait_s_after(full, now_s=104.0) == 4.0
    with pytest.raises(OverloadedError):
        following.wait_s_after(full, now_s=108.0)


def test_who_is_away_is_asked_again_when_it_says_so() -> None:
    following = Following(attach=pb.AttachRequest(request_id="r"), resume_s=10.0)
    away = UnavailableError("the store does not answer", retry_after_s=4.0, is_of_service=True)
    assert following.wait_s_after(away, now_s=100.0) == 4.0
    assert following.wait_s_after(UnavailableError("nobody is there"), now_s=104.0) < 1.0
    assert following.wait_s_after(away, now_s=105.0) == 4.0
    with pytest.raises(UnavailableError) as told:
        following.wait_s_after(away, now_s=109.0)
    assert told.value.retry_after_s == 4.0


def test_what_is_told_again_does_not_hold_a_client() -> None:
    """One choice has ended, and a gateway drops each who attaches for the other."""
    following = Following(attach=pb.AttachRequest(request_id="r", positions=[0, 0]), resume_s=5.0)
    ends_s = [100.0]

    def take_and_drop() -> None:
        while ends_s[-1] < 200.0:
            following.feed(finished(1))
            ends_s.append(ends_s[-1] + following.wait_s_after(None, now_s=ends_s[-1]))

    with pytest.raises(UnavailableError):
        take_and_drop()
    assert ends_s[-1] <= 106.0


def test_who_found_another_gateway_has_lost_none() -> None:
    """A queue is longer than the time for which a gateway is looked for."""
    following = Following(attach=pb.AttachRequest(request_id="r"), resume_s=5.0)
    for lost_at_s in (100.0, 200.0, 300.0):
        assert following.wait_s_after(None, now_s=lost_at_s) < 1.0
        following.feed(accepted())


def test_what_was_held_back_until_the_end_is_handed_out_once() -> None:
    """A last text has no token of its own, by whose position it would be known when it is told
    again: the connection broke between it and the end."""
    following = Following(attach=pb.AttachRequest(request_id="r"), resume_s=5.0)
    rest = pb.GenerationEvent(delta=pb.Delta(position=2, text="c"))
    told = [following.feed(delta(0, "ab")), following.feed(rest)]
    following.wait_s_after(None, now_s=100.0)
    told += [following.feed(each) for each in (accepted(), rest, finished(2), done(2))]
    assert [each.text for each in told if each is not None] == ["ab", "c"]
    assert following.completion().text == "abc"


def test_a_gateway_that_takes_and_drops_each_does_not_hold_a_client() -> None:
    following = Following(attach=pb.AttachRequest(request_id="r"), resume_s=5.0)
    ends_s = [100.0]

    def take_and_drop() -> None:
        while ends_s[-1] < 200.0:
            following.feed(accepted())
            ends_s.append(ends_s[-1] + following.wait_s_after(None, now_s=ends_s[-1]))

    with pytest.raises(UnavailableError):
        take_and_drop()
    assert ends_s[-1] <= 106.0


def test_without_a_time_to_come_again_there_is_no_use_in_it() -> None:
    following = Following(
        generate=pb.GenerateRequest(request_id="r"), resume_s=0.0, overload_s=10.0
    )
    with pytest.raises(OverloadedError):
        following.wait_s_after(OverloadedError("your tenant's bound"), now_s=0.0)


async def test_the_place_in_the_queue() -> None:
    waiting = pb.GetRequestResponse(
        request_id="r", state=pb.REQUEST_STATE_LIVE, queue_position=3, queue_reason="slots"
    )
    running = pb.GetRequestResponse(request_id="r", state=pb.REQUEST_STATE_LIVE)
    scripts: Any = ([waiting], [running])
    async with ScriptedGateway(*scripts) as gateway, AsyncClient(gateway.address) as client:
        first, second = await client.get("r"), await client.get("r")
    assert (first.queue_position, first.queue_reason) == (3, "slots")
    assert second.queue_position is None


def test_a_loop_in_a_thread_ends_with_what_runs_in_it() -> None:
    ended = []

    async def run_on(started: asyncio.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(True)
            raise

    async def start() -> asyncio.Task[None]:
        started = asyncio.Event()
        task = asyncio.create_task(run_on(started))
        await started.wait()
        return task

    loop = LoopThread("test")
    task = loop.call(start())
    loop.close()
    loop.close()
    assert (task.cancelled(), ended) == (True, [True])


async def test_a_program_may_end_where_an_answer_is_counted() -> None:
    def end(_completion: Completion) -> None:
        raise SystemExit(3)

    def run(address: str) -> int:
        with Client(address) as client:
            try:
                client.complete_all(["hi"], on_done=end)
            except SystemExit as ended:
                return int(str(ended.code))
        return 0

    async with ScriptedGateway(whole("a")) as gateway:
        assert await asyncio.wait_for(asyncio.to_thread(run, gateway.address), WAIT_S) == 3


def test_what_fails_in_the_loop_fails_here() -> None:
    async def fail() -> None:
        raise ValueError("so it is")

    with LoopThread("test") as loop, pytest.raises(ValueError, match="so it is"):
        loop.call(fail())


def test_a_loop_that_was_closed_says_so() -> None:
    """Nobody would ever answer."""
    loop = LoopThread("test")
    loop.close()
    with pytest.raises(RuntimeError, match="test was closed"):
        loop.call(asyncio.sleep(0))
