"""A batch whose gateways, worker, scheduler and store die in mid-work: every line answered once."""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from kaiten.mini import CHECKPOINT
from tests.support.answers import WAIT_S, until
from tests.support.cluster import Cluster
from tests.support.doors import add_door, is_ready
from tests.support.held_steps import held
from tests.support.processes import HELD_WORKER, ServiceProcess
from tests.support.store_server import StoreServer

LINES = 20
# Some lines end before the worker is held, the others do not while it is.
SHORT, HELD_FROM, LONG = 8, 20, 40
ENDPOINT: Any = "/v1/completions"


def body(number: int) -> dict[str, Any]:
    kind = number % 10
    prompt, tokens = f"The chef looks at seat {kind} and", SHORT if kind < 3 else LONG
    return {"model": "mini", "prompt": prompt, "max_tokens": tokens, "seed": kind, "n": 1}


def lines(count: int) -> bytes:
    each = (
        {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body(number)}
        for number in range(count)
    )
    return "\n".join(map(json.dumps, each)).encode()


async def test_every_line_is_answered_exactly_once(tmp_path: Path) -> None:
    await answered_once(tmp_path, LINES)


async def answered_once(folder: Path, count: int, *, timeout_s: float = WAIT_S) -> None:
    """The story, of so many lines: `benchmarks.faults.batch_deaths` tells it of more."""
    async with Cluster(folder, workers=0) as cluster:
        flags: dict[str, object] = {"model": CHECKPOINT, "slots": 4, "threads": 1}
        flags |= {"kv_blocks": 256, "step_tokens": 512}
        lock = folder / "lock"
        flags |= {"lock": lock}
        worker = cluster.add_worker(flags, HELD_WORKER)
        (first, address), (second, other) = add_door(cluster), add_door(cluster)
        for process in (worker, first, second):
            process.start()
        for each in (address, other):
            await until(partial(is_ready, each), "the gateway is ready")
        url = f"http://{address}/v1"
        async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            asked = [client.completions.create(**body(number)) for number in range(10)]
            undisturbed = [each.choices[0].text for each in await asyncio.gather(*asked)]
            file = await client.files.create(file=("lines", lines(count)), purpose="batch")
            with held(lock, HELD_FROM):
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint=ENDPOINT, completion_window="24h"
                )
                await until(partial(_has_some, client, batch.id), "lines are answered")
                for process in (worker, first, second):
                    process.kill()
            # Without its worker it cannot end, and waits for the others to die and come back.
            mortals: list[ServiceProcess | StoreServer] = [
                first, second, cluster.schedulers[0], cluster.store,
            ]  # fmt: skip
            for mortal in mortals:
                await asyncio.to_thread(mortal.kill)
                await asyncio.to_thread(mortal.start)
                await until(partial(_has_some, client, batch.id), "it is there")
            await until(partial(_is, client, batch.id, "in_progress"), "it goes on")
            worker.start()
            await until(partial(_is, client, batch.id, "completed"), "the batch is over", timeout_s)
            batch = await client.batches.retrieve(batch.id)
            assert (batch.status, batch.error_file_id) == ("completed", None)
            assert batch.request_counts is not None
            assert batch.request_counts.completed == count
            assert batch.output_file_id is not None
            output = (await client.files.content(batch.output_file_id)).text
        answers = [json.loads(line) for line in output.splitlines()]
        assert [each["custom_id"] for each in answers] == [f"line-{n}" for n in range(count)]
        texts = [each["response"]["body"]["choices"][0]["text"] for each in answers]
        assert texts == [undisturbed[number % 10] for number in range(count)]


async def _has_some(client: AsyncOpenAI, id: str) -> bool:
    """Whether it can be asked, and some lines have an answer."""
    try:
        counts = (await client.batches.retrieve(id)).request_counts
    except OpenAIError:
        return False
    assert counts is not None
    return counts.completed > 0


async def _is(client: AsyncOpenAI, id: str, status: str) -> bool:
    try:
        return (await client.batches.retrieve(id)).status == status
    except OpenAIError:
        return False
