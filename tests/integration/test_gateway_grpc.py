"""InferenceService and ModelService over real gRPC, the real store and a scripted scheduler."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.kaiten.v1 import inference_service_pb2 as pb
from protos.kaiten.v1.common_pb2 import FinishReason, SamplingParams
from tests.support.gateway_stack import Stack, running_stack, text_of, until


@pytest.fixture
async def stack(tmp_path: Path, redis_url: str, cell: str) -> AsyncIterator[Stack]:
    async with running_stack(tmp_path / "model", redis_url, cell) as running:
        yield running


async def test_generate_streams_text_and_ends_with_done(stack: Stack) -> None:
    stack.says("hello 😀 world")
    events = await stack.generate(text="say it", return_token_ids=True)
    assert [event.WhichOneof("event") for event in events][0] == "accepted"
    assert [event.WhichOneof("event") for event in events][-2:] == ["finished", "done"]
    assert text_of(events) == "hello 😀 world"
    expected = stack.gateway.ids("hello 😀 world")
    deltas = [event.delta for event in events if event.HasField("delta")]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert token_ids == [*expected, stack.gateway.card.eos_token_ids[0]]
    positions = [delta.position for delta in deltas]
    assert positions == sorted(positions)
    assert events[-2].finished.reason == FinishReason.FINISH_REASON_STOP
    assert events[-2].finished.output_tokens == len(token_ids)
    assert events[-1].done.usage.output_tokens == len(token_ids)
