"""The scheduler with everything well: requests in, tokens out, bounds and ends."""

from pathlib import Path

from protos.kaiten.v1.common_pb2 import FINISH_REASON_LENGTH
from tests.support.cluster import Cluster


async def test_one_request(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        answer = await cluster.submit(max_tokens=20)
        await answer.done()
        assert answer.reasons == [FINISH_REASON_LENGTH]
