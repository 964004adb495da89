"""A rolling update under load, from an earlier commit to this one and back, in every order.

    python -m benchmarks.faults.upgrade [--old COMMIT] [--streams 64] [--tokens 200] [--orders 6]
        [--dtype fp32] [--save]

Two gateways, two schedulers and two workers as processes of their own, all of the old commit (each
commit in a git worktree that shares this environment's packages). As many streams as asked for are
under way all the time, half of them greedy and half seeded: who ends begins again. Then each
process gets SIGTERM and its place is taken by one of the new version, role by role in one of the
six orders, and back.
`changed` are texts that differ from those that the old version said alone, of `texts` in all;
`failed` are streams that ended with an error. `differ_alone` are prompts to which the versions,
each alone, say something else: where one sums in another order, a choice that was nearly a tie
falls otherwise, so in bf16 a text that moves between such versions may be neither's. Between roles
a few requests want what only the new version knows (an output by a JSON schema): `structured`
counts how they ended. Goals: 0 changed, 0 failed, and a structured output is right or refused,
never neglected.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.recording import ROOT, commit, record
from kaiten.client import ApiError, AsyncClient
from kaiten.local.ports import HeldPort
from kaiten.mini import CHECKPOINT
from kaiten.probe import says_serving
from tests.support.cluster import Flags, argv_of
from tests.support.store_server import StoreServer

# Of release 0.2.0.
OLD: Final = "dd03a4f"
MODULES: Final = {"gateway": "gateway", "scheduler": "scheduler_svc", "worker": "gpu_worker"}
EACH: Final = 2
PROMPT_TOKENS: Final = (3, 120)
# The first start of an old version compiles its kernels.
READY_S_MAX: Final = 400.0
DRAIN_S: Final = 1.0
POLL_S: Final = 0.1
SCHEMA: Final = {
    "type": "object",
    "properties": {"dish": {"enum": ["soup", "rice"]}, "price": {"type": "integer"}},
    "required": ["dish", "price"],
    "additionalProperties": False,
}


class Part:
    """A process of one role, of whichever tree it is started from."""

    def __init__(self, name: str, module: str, flags: Flags, address: str, log: Path) -> None:
        self.name = name
        self.address = address
        self.log = log
        self._module = module
        self._flags = flags
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, tree: Path) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", self._module, *argv_of(self._flags)],
                env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                cwd=self.log.parent,
                stdout=log,
                stderr=log,
            )

    async def ready(self) -> None:
        """RuntimeError with its log when it is not."""
        give_up_at = time.monotonic() + READY_S_MAX
        while not await asyncio.to_thread(says_serving, self.address):
            assert self._process is not None
            if self._process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"{self.name} does not serve:\n{self.log.read_text()[-3000:]}")
            await asyncio.sleep(POLL_S)

    async def replaced(self, tree: Path) -> None:
        """As an orchestrator does: SIGTERM, its end, the next."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(self._process.wait, READY_S_MAX)
        self.start(tree)
        await self.ready()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Stack:
    """Everything twice, beside one store."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self._held = contextlib.ExitStack()
        self.store = StoreServer(folder / "store")
        self.parts: dict[str, list[Part]] = {role: [] for role in MODULES}
        schedulers = [self._port() for _ in range(EACH)]
        named = ",".join(port.address for port in schedulers)
        model: Flags = {"model": CHECKPOINT, "served_model_name": "mini"}
        for index in range(EACH):
            flags: dict[str, Flags] = {
                "scheduler": {"redis_url": self.store.url},
                "worker": {
                    "scheduler": named,
                    "slots": 64,
                    "threads": 1,
                    "kv_blocks": 2048,
                    "dtype": dtype,
                    **model,
                },
                "gateway": {"redis_url": self.store.url, "http_port": self._port().number, **model},
            }
            for role, module in MODULES.items():
                port = schedulers[index] if role == "scheduler" else self._port()
                own = {"grpc_port": port.number, "drain_s": DRAIN_S, **flags[role]}
                name = f"{role}-{index}"
                part = Part(name, module, own, port.address, folder / f"{name}.log")
                self.parts[role].append(part)
        self.http = [f"http://127.0.0.1:{flags['gateway']['http_port']}"]
        self.address = "ipv4:" + ",".join(part.address for part in self.parts["gateway"])

    def _port(self) -> HeldPort:
        return self._held.enter_context(HeldPort())

    async def start(self, tree: Path) -> None:
        self.store.start()
        everybody = [*itertools.chain.from_iterable(self.parts.values())]
        for part in everybody:
            part.start(tree)
        for part in everybody:
            await part.ready()

    def close(self) -> None:
        for part in itertools.chain.from_iterable(self.parts.values()):
            part.kill()
        self.store.stop()
        self._held.close()


@dataclass(slots=True)
class Load:
    """Streams without end, each compared with what was said undisturbed."""

    address: str
    prompts: list[list[int]]
    tokens: int
    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)
    texts: int = 0
    changed: int = 0
    failed: list[str] = field(default_factory=list)
    gap_s: float = 0.0

    async def once(self, client: AsyncClient, number: int) -> tuple[int, ...]:
        how: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        how |= {"seed": number} if number % 2 else {"temperature": 0}
        found: list[int] = []
        heard_s = time.monotonic()
        async with client.generate(
            token_ids=self.prompts[number], max_tokens=self.tokens, **how
        ) as generation:
            async for delta in generation:
                self.gap_s = max(self.gap_s, time.monotonic() - heard_s)
                heard_s = time.monotonic()
                found += delta.token_ids
        return tuple(found)

    async def undisturbed(self) -> None:
        async with AsyncClient(self.address) as client:
            numbers = range(len(self.prompts))
            told = await asyncio.gather(*(self.once(client, number) for number in numbers))
        self.expected = dict(zip(numbers, told, strict=True))

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncIterator[None]:
        """Until the block ends; what is under way then is read to its end."""
        stopping = asyncio.Event()

        async def again_and_again(client: AsyncClient, number: int) -> None:
            while not stopping.is_set():
                try:
                    found = await self.once(client, number)
                except ApiError as error:
                    self.failed.append(str(error))
                    continue
                self.texts += 1
                self.changed += found != self.expected[number]

        self.texts, self.changed, self.failed, self.gap_s = 0, 0, [], 0.0
        async with (
            AsyncClient(self.address, resume_s=120.0) as client,
            asyncio.TaskGroup() as group,
        ):
            for number in range(len(self.prompts)):
                group.create_task(again_and_again(client, number))
            try:
                yield
            finally:
                stopping.set()


async def structured(http: str) -> str:
    """How a request ends that wants an output by a schema."""
    body = {
        "messages": [{"role": "user", "content": "What is there?"}],
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "dish", "schema": SCHEMA, "strict": True},
        },
    }
    async with httpx.AsyncClient(timeout=60) as client:
        try:
            answer = await client.post(f"{http}/v1/chat/completions", json=body)
        except httpx.TransportError as error:
            return type(error).__name__
    if answer.status_code != 200:
        return f"refused {answer.status_code}"
    choice = answer.json()["choices"][0]
    try:
        told = json.loads(choice["message"]["content"])
    except ValueError:
        return "neglected" if choice["finish_reason"] == "stop" else "cut or neglected"
    return "right" if set(told) == {"dish", "price"} else "neglected"


async def rolled(stack: Stack, load: Load, order: Sequence[str], tree: Path) -> dict[str, Any]:
    """Replace everything, role by role, under load."""
    asked: Counter[str] = Counter()
    began_s = time.monotonic()
    async with load.under_way():
        for role in order:
            for part in stack.parts[role]:
                await part.replaced(tree)
            asked.update([f"after {role}: {await structured(stack.http[0])}"])
    told = {
        "order": list(order),
        "texts": load.texts,
        "changed": load.changed,
        "failed": len(load.failed),
        "gap_s": round(load.gap_s, 2),
        "s": round(time.monotonic() - began_s, 1),
        "structured": dict(asked),
    }
    print(told, load.failed[:2], flush=True)
    return told


@contextlib.contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """A worktree of that commit for as long as the block lasts."""
    with tempfile.TemporaryDirectory(prefix="kaiten-tree-") as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


@contextlib.asynccontextmanager
async def serving(tree: Path, chosen: argparse.Namespace) -> AsyncIterator[tuple[Stack, Load]]:
    """A stack of that version, and what it says when nothing happens."""
    draw = random.Random(7)
    prompts = [
        [7 + draw.randrange(1000) for _ in range(draw.randint(*PROMPT_TOKENS))]
        for _ in range(chosen.streams)
    ]
    with tempfile.TemporaryDirectory(prefix="kaiten-upgrade-") as folder:
        stack = Stack(Path(folder), chosen.dtype)
        try:
            await stack.start(tree)
            load = Load(stack.address, prompts, chosen.tokens)
            await load.undisturbed()
            yield stack, load
        finally:
            stack.close()


async def measure(old: Path, new: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    rounds = []
    async with serving(new, chosen) as (_, alone):
        pass
    async with serving(old, chosen) as (stack, load):
        differ = sum(load.expected[number] != alone.expected[number] for number in load.expected)
        print(f"{differ} prompts are answered otherwise by the versions alone", flush=True)
        for order in [*itertools.permutations(MODULES)][: chosen.orders]:
            for way, tree in (("to this", new), ("back", old)):
                rounds.append({"way": way, **await rolled(stack, load, order, tree)})
    figures = ("texts", "changed", "failed")
    return {
        "old": chosen.old,
        "new": chosen.new,
        "dtype": chosen.dtype,
        "streams": chosen.streams,
        "tokens": chosen.tokens,
        "differ_alone": differ,
        **{name: sum(each[name] for each in rounds) for name in figures},
        "load_after": round(os.getloadavg()[0], 1),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--old", default=OLD, help="the commit to come from")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--orders", type=int, default=6, help="of the roles, each there and back")
    parser.add_argument("--dtype", default="fp32", help="of the workers: fp32 or bf16")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args()
    chosen.new = commit().removesuffix("+")
    # As committed: who edits the tree meanwhile changes nothing.
    with tree_of(chosen.old) as old, tree_of(chosen.new) as new:
        figures = asyncio.run(measure(old, new, chosen))
    record("upgrade", figures, save=chosen.save)


if __name__ == "__main__":
    main()
