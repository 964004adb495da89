"""A background response whose client is gone while every process dies in turn."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI, OpenAIError

from kaiten.mini import CHECKPOINT
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.doors import add_door, is_ready
from tests.support.held_steps import held
from tests.support.processes import HELD_WORKER, ServiceProcess
from tests.support.store_server import StoreServer

ASKED: Any = {
    "model": "mini",
    "instructions": "Be brief.",
    "input": "Tell me about soup.",
    "max_output_tokens": 150,
    "temperature": 0.8,
    "background": True,
    "extra_body": {"ignore_eos": True, "seed": 5},
}


async def test_it_is_retrieved_whole_and_equal(tmp_path: Path) -> None:
    async with Cluster(tmp_path, workers=0) as cluster:
        flags: dict[str, object] = {"model": CHECKPOINT, "slots": 4, "threads": 1}
        flags |= {"kv_blocks": 256, "step_tokens": 512}
        lock = tmp_path / "lock"
        flags |= {"lock": lock}
        worker = cluster.add_worker(flags, HELD_WORKER)
        gateway, address = add_door(cluster)
        for process in (worker, gateway):
            process.start()
        await until(partial(is_ready, address), "the gateway is ready")
        async with AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="any", max_retries=0
        ) as client:
            talk = await client.conversations.create()
            with held(lock, 20):
                response = await client.responses.create(**ASKED, conversation=talk.id)
                worker.kill()
            # Without its worker it cannot end, and waits for the others to die and come back.
            mortals: list[ServiceProcess | StoreServer] = [
                gateway, cluster.schedulers[0], cluster.store,
            ]  # fmt: skip
            for mortal in mortals:
                await asyncio.to_thread(mortal.kill)
                await asyncio.to_thread(mortal.start)
                await until(
                    partial(_is_live, client, response.id), "it is there, and has not ended"
                )
            worker.start()
            # Nobody dies any more. Asked beside the one that survived: their steps are the same.
            undisturbed = await _ended(client, (await client.responses.create(**ASKED)).id)
            assert undisturbed.usage.output_tokens == ASKED["max_output_tokens"]
            found = await _ended(client, response.id)
            assert found.output_text == undisturbed.output_text
            assert found.usage.output_tokens == undisturbed.usage.output_tokens
            assert (found.instructions, found.status) == ("Be brief.", "incomplete")
            said = await client.conversations.items.list(talk.id)
            assert [each.content[0].text async for each in said] == [  # type: ignore[index, union-attr]
                found.output_text, ASKED["input"],
            ]  # fmt: skip
            going_on = await client.responses.create(
                model="mini", input="And?", previous_response_id=found.id, max_output_tokens=1
            )
            assert going_on.usage is not None
            assert going_on.usage.input_tokens > undisturbed.usage.input_tokens + 100


async def _is_live(client: AsyncOpenAI, id: str) -> bool:
    try:
        found = await client.responses.retrieve(id)
    except OpenAIError:
        return False
    assert found.status in ("queued", "in_progress")
    return True


async def _ended(client: AsyncOpenAI, id: str) -> Any:
    found: Any = None

    async def has_ended() -> bool:
        nonlocal found
        found = await client.responses.retrieve(id)
        return found.status not in ("queued", "in_progress")

    await until(has_ended, "the response has ended")
    return found
