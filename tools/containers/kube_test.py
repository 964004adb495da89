"""The pods of deploy/kubernetes on the engine of this machine: up, served, replaced one by one.

    python -m tools.containers.kube_test [--streams 64] [--tokens 300] [--tag latest] [--save]

Needs podman, root, kubectl or kustomize, and the images of `make images ARGS=--store`. Streams are
read once undisturbed, and once for each workload whose pods are replaced under them as a rollout
does: the new one is ready before the old one gets SIGTERM, but the store and the gateway, whose
place and address only one can have. No text may change, and no probe for liveness may fail.
Without an engine the exit code is 77.
"""

import argparse
import asyncio
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.recording import record
from tools.containers import kustomize
from tools.containers.engine import SKIPPED, EngineError, find, run_or_exit
from tools.containers.pods import Pods
from tools.containers.streams import Streams

# In the order that they are started and replaced.
FIRST: Final = ("valkey-1", "scheduler-1", "scheduler-2", "worker-1", "gateway-1")
SURGES: Final = ("scheduler", "worker")
# The furthest stream has this share of its tokens when pods are replaced.
WHEN: Final = 0.15
READY_S: Final = 300.0
POLL_S: Final = 0.5


class Cell:
    """The pods that are there, and how one takes another's place."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._gateway_ip = ""
        self._numbers = {"valkey": 1, "scheduler": 2, "worker": 1, "gateway": 1}

    @property
    def address(self) -> str:
        return f"{self._gateway_ip}:50051"

    async def up(self) -> None:
        for pod in FIRST:
            await self._start(pod)
        self._gateway_ip = self._pods.address("gateway-1")
        await self._wait("gateway-1")

    async def replace(self, workload: str) -> None:
        """Every pod of it, one by one."""
        for old in [pod for pod, mine in self._pods.running.items() if mine == workload]:
            self._numbers[workload] += 1
            new = f"{workload}-{self._numbers[workload]}"
            if workload in SURGES:
                await self._start(new)
                await self._wait(new)
                await asyncio.to_thread(self._pods.stop, old)
            else:
                await asyncio.to_thread(self._pods.stop, old)
                await self._start(new)
                await self._wait(new)
            self._look_alive()

    async def _start(self, pod: str) -> None:
        workload = pod.rpartition("-")[0]
        ip = self._gateway_ip if workload == "gateway" else ""
        await asyncio.to_thread(self._pods.start, workload, pod, ip)

    async def _wait(self, pod: str) -> None:
        until = time.monotonic() + READY_S
        while not await asyncio.to_thread(self._pods.probe, pod, "readinessProbe"):
            if time.monotonic() > until:
                raise EngineError(f"{pod} is not ready:\n{self._pods.logs(pod)}")
            await asyncio.sleep(POLL_S)

    def _look_alive(self) -> None:
        for pod in self._pods.running:
            if not self._pods.probe(pod, "livenessProbe"):
                raise EngineError(f"{pod} would be ended:\n{self._pods.logs(pod)}")


async def story(cell: Cell, streams: int, tokens: int) -> dict[str, Any]:
    began = time.monotonic()
    await cell.up()
    told: dict[str, Any] = {"ready_s": round(time.monotonic() - began, 1)}
    asked = Streams(cell.address, count=streams, tokens=tokens)
    golden = await asked.read()
    for workload in ("worker", "scheduler", "valkey", "gateway"):

        async def disturbance(workload: str = workload) -> None:
            await cell.replace(workload)

        heard = await asked.read(round(WHEN * tokens), disturbance)
        told[workload] = {
            "texts_changed": heard.changed(golden),
            "gap_s": heard.gap_s,
            "under_way_after": heard.still_under_way,
        }
        print(f"{workload} replaced: {told[workload]}", flush=True)
    return told


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--tag", default="latest", help="of the images")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    chosen = parser.parse_args(words)
    try:
        engine = find("podman")
    except EngineError as error:
        print(error)
        sys.exit(SKIPPED)
    if os.getuid():
        raise EngineError("addresses of pods are reached by root only")
    folder = Path(tempfile.mkdtemp(prefix="kaiten-kube-"))
    # Pods' users pass through it.
    folder.chmod(0o755)
    password = secrets.token_hex(16)
    pods = Pods(
        engine,
        folder.name.replace("_", "-").lower(),
        folder,
        kustomize.render(kustomize.FOLDER / "overlays" / "cpu"),
        {
            "kaiten-store": {
                "password": password,
                "url": f"redis://kaiten:{password}@valkey:6379/0",
            },
            "kaiten-peers": {"credential": secrets.token_hex(32)},
        },
        chosen.tag,
    )
    # Whoever ends it finds no pods left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        told = asyncio.run(story(Cell(pods), chosen.streams, chosen.tokens))
    finally:
        pods.remove()
        shutil.rmtree(folder, ignore_errors=True)
    told |= {"engine": engine.version(), "streams": chosen.streams, "tokens": chosen.tokens}
    if any(each.get("texts_changed") for each in told.values() if isinstance(each, dict)):
        raise EngineError(f"texts changed: {told}")
    record("kube_test", told, save=chosen.save)


if __name__ == "__main__":
    run_or_exit(main)
