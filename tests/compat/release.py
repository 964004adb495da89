"""What is kept of a release: its wire format, a store it left behind, and an archive it wrote.

    releases/<version>/protos.binpb      descriptor set of every .proto file
                       store.json        every key of a cell whose leader was killed in the middle,
                                         with what tenants keep there (since 0.2.0)
                       outputs.json      tokens of all its requests, by their ids, as they must end
                       archive/          the segments of that cell

`python -m tests.compat.release VERSION` writes one, once, when a version is cut. What is there is
never written anew: it is what users have on their disks.
"""

import asyncio
import json
import shutil
import sys
import tempfile
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from redis.asyncio import Redis

from kaiten.v1.ledger_pb2 import SubmitRecord
from kaiten.v1.worker_service_pb2 import RowSampling
from ledger import Ledger
from ledger.batches.batches import BatchName
from ledger.keys import Keys
from tests.support.cluster import Cluster, gold
from tests.support.store_server import StoreServer

PROTOS = Path(__file__).parents[2] / "protos"
RELEASES = Path(__file__).parent / "releases"
# One command that makes a key as it was, its arguments in base64.
Command = list[str]
RESULT_TTL_MS = 3_600_000
TENANT, CONTENT = "default", b"what is in all of them\n"
BATCH = BatchName(TENANT, "batch_kept")
FILE, CONVERSATION, NOTED = "file-kept", "conv_kept", f"{TENANT}:noted"
# Of every prompt and output: some are cut, some preempted, all on a few kilobytes.
WORKER_FLAGS = {
    "slots": 8,
    "step_tokens": 40,
    "block_size": 4,
    "kv_blocks": 60,
    "context_tokens": 200,
}


def write_protos(path: Path) -> None:
    """The descriptor set of every .proto file, as `buf breaking` reads it."""
    sources = sorted(str(source) for source in PROTOS.rglob("*.proto"))
    arguments = [f"-I{PROTOS}", "--include_imports", f"--descriptor_set_out={path}", *sources]
    assert protoc.main(["protoc", *arguments]) == 0


async def dump(url: str, cell: str) -> list[Command]:
    """Commands that make every key of a cell as it is, but for when it expires."""
    commands: list[list[bytes | str | int]] = []
    async with Redis.from_url(url) as opened:
        store: Any = opened
        for key in sorted([key async for key in store.scan_iter(f"{Keys(cell).prefix}*")]):
            kind = (await store.type(key)).decode()
            if kind == "hash":
                pairs = await store.hgetall(key)
                commands.append(["HSET", key, *[part for pair in pairs.items() for part in pair]])
            elif kind == "stream":
                for entry_id, pairs in await store.xrange(key):
                    fields = [part for pair in pairs.items() for part in pair]
                    commands.append(["XADD", key, entry_id, *fields])
                last = (await store.xinfo_stream(key))["last-generated-id"]
                commands.append(["XSETID", key, last])
            elif kind == "zset":
                for member, score in await store.zrange(key, 0, -1, withscores=True):
                    commands.append(["ZADD", key, f"{score:.0f}", member])
            else:
                assert kind == "string", f"{key!r} is a {kind}: say how it is kept"
                commands.append(["SET", key, await store.get(key)])
            if await store.ttl(key) > 0:
                commands.append(["PEXPIRE", key, RESULT_TTL_MS])
    return [[_written(argument) for argument in command] for command in commands]


async def load(url: str, commands: list[Command]) -> None:
    """Into an empty store."""
    async with Redis.from_url(url) as opened:
        store: Any = opened
        for command in commands:
            await store.execute_command(*map(b64decode, command))


def _written(argument: bytes | str | int) -> str:
    raw = argument if isinstance(argument, bytes) else str(argument).encode()
    return b64encode(raw).decode()


async def keep_something(ledger: Ledger) -> None:
    """Of each kind that a tenant may have, and that is live for as long as they like."""
    size = len(CONTENT)
    await ledger.files.put(TENANT, FILE, 0, CONTENT)
    await ledger.files.keep(
        TENANT, FILE, filename="a.jsonl", purpose="batch", size_bytes=size, chunks=1
    )
    fields = {"input_file_id": FILE, "endpoint": "/v1/completions", "metadata": "{}"}
    await ledger.batches.new(BATCH, fields, window_s=86_400)
    await ledger.batches.move(BATCH, "in_progress", of=("validating",))
    await ledger.batches.answer(BATCH, 0, CONTENT, is_ok=True)
    await ledger.conversations.new(TENANT, CONVERSATION, CONTENT)
    sampling = RowSampling(max_tokens=4, top_p=1.0, logprobs=-1)
    record = SubmitRecord(
        id=NOTED, tenant=TENANT, n=1, prompt_token_ids=range(7, 17), sampling=sampling
    )
    await ledger.submit(record, b"noted", note=CONTENT)


async def require_kept(ledger: Ledger) -> None:
    """All of it is there, as it was, and the batch can end."""
    file = await ledger.files.find(TENANT, FILE)
    assert (file.filename, file.purpose, file.size_bytes) == ("a.jsonl", "batch", len(CONTENT))
    assert [piece async for piece in ledger.files.read(TENANT, file)] == [CONTENT]
    batch = await ledger.batches.find(BATCH)
    assert (batch.status, batch.number("completed")) == ("in_progress", 1)
    assert await ledger.batches.live() == [BATCH]
    assert await ledger.batches.answers(BATCH, [0]) == [CONTENT]
    assert (await ledger.conversations.find(TENANT, CONVERSATION)).content == CONTENT
    assert await ledger.note(NOTED) == CONTENT
    assert await ledger.batches.move(BATCH, "cancelled", of=(batch.status,)) == "cancelled"


async def leave_behind(
    folder: Path, archive: Path
) -> tuple[list[Command], dict[str, list[list[int]]]]:
    """A cell in the middle of its work: some requests over, some begun, some waiting."""
    flags = {"archive_dir": archive, "fold_records": 8}
    worker_flags = {**WORKER_FLAGS, "gates": folder / "gates"}
    async with Cluster(folder, scheduler_flags=flags, worker_flags=worker_flags) as cluster:
        cluster.gates()
        for size in range(3):
            await cluster.submit(prompt_tokens=9 + size, max_tokens=5 + size, n=1 + size % 2)
        await cluster.all_done()
        assert all(answer.token_count for answer in cluster.answers)
        cluster.gates(50)
        asked: list[dict[str, Any]] = [{}, {"n": 2}, {"logprobs": 1}, {"prompt_logprobs": 1}]
        begun = [
            await cluster.submit(prompt_tokens=20 + size, max_tokens=60, **options)
            for size, options in enumerate(asked)
        ]
        for answer in begun:
            await answer.has_tokens(10)
        with cluster.held():
            await keep_something(cluster.ledger)
            for size in range(2):
                await cluster.submit(prompt_tokens=9 + size, max_tokens=20)
            await asyncio.sleep(1)  # The archive's writer has everything by now.
            for process in (*cluster.workers, *cluster.schedulers):
                process.kill()
        cluster.is_checked = False
        outputs = {
            answer.record.id: [
                gold(one, answer.record.sampling.max_tokens) for one in answer.sequence_ids
            ]
            for answer in cluster.answers
        }
        return await dump(cluster.store.url, cluster.ledger.keys.cell), outputs


async def freeze(version: str) -> Path:
    """Write what is to be kept of this version; never over what is there."""
    target = RELEASES / version
    target.mkdir(parents=True)
    write_protos(target / "protos.binpb")
    with tempfile.TemporaryDirectory() as folder:
        commands, outputs = await leave_behind(Path(folder), Path(folder) / "archive")
        shutil.copytree(Path(folder) / "archive", target / "archive")
    lines = ",\n".join(json.dumps(command) for command in commands)
    (target / "store.json").write_text(f"[\n{lines}\n]\n")
    (target / "outputs.json").write_text(json.dumps(outputs) + "\n")
    return target


async def restored(release: Path, server: StoreServer) -> dict[str, list[list[int]]]:
    """Fill an empty store with what a release left; what its requests must end with."""
    await load(server.url, json.loads((release / "store.json").read_text()))
    outputs: dict[str, list[list[int]]] = json.loads((release / "outputs.json").read_text())
    return outputs


if __name__ == "__main__":
    asyncio.run(freeze(sys.argv[1]))
