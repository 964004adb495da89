"""How much comes at once: a message fits what clients accept, and a whole is not told in crumbs."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from gateway.grpc.convert import write_event
from gateway.observe.metrics import Visit
from gateway.requests.stream import (
    DELTA_TOKENS_MAX,
    STREAM_INTERVAL,
    Accepted,
    Delta,
    Event,
    Finished,
    Generation,
    Presentation,
    new_choices,
)
from gateway.text.detokenizer import Pieces
from kaiten.v1.common_pb2 import FinishReason, TokenLogprobs
from kaiten.v1.inference_service_pb2 import GenerationEvent
from kaiten.v1.ledger_pb2 import JournalRecord, RenderOptions, SequenceFinished
from ledger import Follower, Update
from tests.support.tokenizers import byte_level_bpe

# What a gRPC client takes that sets nothing.
MESSAGE_BYTES_MAX = 4 << 20
TOKENS = 100_000


class OneUpdate:
    """A subscription with a single update."""

    def __init__(self, update: Update) -> None:
        self._updates = iter((update,))

    async def __anext__(self) -> Update:
        try:
            return next(self._updates)
        except StopIteration:
            raise StopAsyncIteration from None


class Kept:
    """A ledger that has nothing any more, so that a test ends at its choices' ends."""

    async def result(self, _id: str) -> None:
        return None


def long_update() -> Update:
    likeliest = TokenLogprobs(
        logprob=-1.5, top_token_ids=[120_000 + i for i in range(20)], top_logprobs=[-1.5] * 20
    )
    ended = SequenceFinished(
        sequence_id=1, reason=FinishReason.FINISH_REASON_LENGTH, output_tokens=TOKENS
    )
    ids = [index % 400 for index in range(TOKENS)]
    return Update(
        sequence_id=1, position=0, token_ids=ids, logprobs=[likeliest] * TOKENS, finished=ended
    )


def generation_of(update: Update, start: int) -> Generation:
    return Generation(
        accepted=Accepted("x", 1),
        id="default:x",
        sequence_id=1,
        choices=new_choices(
            Presentation(pieces=Pieces(byte_level_bpe()), render=RenderOptions()), 1, [start]
        ),
        subscription=cast(Any, OneUpdate(update)),
        ledger=cast(Any, Kept()),
        release=lambda _release: None,
        render=RenderOptions(),
    )


async def events_of(start: int) -> AsyncIterator[Event]:
    generation = generation_of(long_update(), start)
    await anext(generation)
    for event in await anext(generation):
        yield event


@pytest.mark.parametrize("start", [0, 1, DELTA_TOKENS_MAX, DELTA_TOKENS_MAX + 1, TOKENS - 1])
async def test_a_long_output_comes_in_messages_that_fit(start: int) -> None:
    position, text = start, []
    async for event in events_of(start):
        message = GenerationEvent()
        write_event(message, event, with_token_ids=True)
        size = message.ByteSize()
        assert size < MESSAGE_BYTES_MAX
        if isinstance(event, Delta):
            assert event.position == position
            assert len(event.token_ids) == len(event.logprobs)
            position += len(event.token_ids)
            text.append(event.text)
    assert position == TOKENS
    assert (
        "".join(text)
        == byte_level_bpe().decode([i % 400 for i in range(TOKENS)])[-len("".join(text)) :]
    )


@pytest.mark.parametrize("stop", [(), ("no such words",)])
async def test_of_a_whole_the_first_token_is_told_and_then_dozens_unless_a_word_may_end_it(
    stop: tuple[str, ...],
) -> None:
    render, tokens = RenderOptions(stop=stop), 3 * STREAM_INTERVAL
    follower = Follower(cast(Any, Kept()))
    follower.start_at(0)
    generation = Generation(
        accepted=Accepted("x", 1),
        id="default:x",
        sequence_id=1,
        choices=new_choices(Presentation(pieces=Pieces(byte_level_bpe()), render=render), 1),
        subscription=follower.subscribe([1], from_seq=0, positions={1: 0}),
        ledger=cast(Any, Kept()),
        release=lambda _release: None,
        render=render,
    )
    generation.collect()
    await anext(generation)
    counts = []
    for position in range(tokens):
        follower.take(
            JournalRecord(seq=position + 1, sequence_ids=[1], positions=[position], token_ids=[70])
        )
        look = generation.__anext__()
        try:
            look.send(None)
        except StopIteration as found:
            [delta] = found.value
            counts.append(len(delta.token_ids))
        look.close()
    assert counts == ([1] * tokens if stop else [1, STREAM_INTERVAL, STREAM_INTERVAL])


@pytest.mark.parametrize("token_ids", [[], [7]])
async def test_an_end_without_output_is_no_first_token(token_ids: list[int]) -> None:
    """Of what is cancelled, late or failed before it had one, nobody knows when it would come."""
    cancelled = FinishReason.FINISH_REASON_CANCELLED
    ended = SequenceFinished(sequence_id=1, reason=cancelled, output_tokens=len(token_ids))
    update = Update(sequence_id=1, position=0, token_ids=token_ids, logprobs=[], finished=ended)
    generation = generation_of(update, start=0)
    generation.visit = Visit(tenant="", is_chat=False)
    await anext(generation)
    assert isinstance((await anext(generation))[-1], Finished)
    assert bool(generation.visit.first_ns) is bool(token_ids)
