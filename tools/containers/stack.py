"""One project of docker-compose.yml on an engine: up, scaled, a container killed under streams."""

import argparse
import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from kaiten.client import ApiError, AsyncClient
from kaiten.local.ports import HeldPort
from tools.containers import images
from tools.containers.engine import Engine, EngineError, Project
from tools.containers.streams import Heard, Streams

# Of `--native`, by the path that is asked for.
NATIVE: Final = {"native": "on", "torch": "off"}
# The furthest stream has this share of its tokens when a container is killed.
WHEN: Final = 0.15
WAIT_S: Final = 300.0
POLL_S: Final = 0.2
PROBE: Final = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(1e3 * (used.ru_utime + used.ru_stime))
"""


class StackTest:
    """One project from `up` to `down`."""

    def __init__(
        self,
        engine: Engine,
        path: str,
        chosen: argparse.Namespace,
        settings: Mapping[str, str],
    ) -> None:
        self.engine = engine
        with HeldPort() as grpc, HeldPort() as http:
            ports = {"KAITEN_GRPC_PORT": str(grpc.number), "KAITEN_HTTP_PORT": str(http.number)}
        self.address = f"127.0.0.1:{ports['KAITEN_GRPC_PORT']}"
        environment = {name: text for name, text in os.environ.items() if "KAITEN" not in name}
        environment |= {
            "KAITEN_STORE_PASSWORD": secrets.token_hex(16),
            "KAITEN_WORKER_NATIVE": NATIVE[path],
            "KAITEN_WORKER_KV_MEMORY_MB": "256",
            **ports,
            **settings,
        }
        self.project = Project(engine, f"kaiten-test-{path}", images.ROOT, environment)
        self.streams = Streams(self.address, count=chosen.streams, tokens=chosen.tokens)
        self.undisturbed: Heard | None = None
        self._at = int(chosen.tokens * WHEN)

    async def up(self) -> float:
        """Seconds from `up` to the first token."""
        began_s = time.monotonic()
        starting = asyncio.create_task(
            asyncio.to_thread(self.project.compose, "up", "--detach", "--no-build")
        )
        while True:
            try:
                async with AsyncClient(self.address, resume_s=0.0) as client:
                    await client.complete("Once upon a time", max_tokens=1, timeout_s=10.0)
                break
            except ApiError as error:
                if starting.done():
                    await starting  # What it says comes first.
                if time.monotonic() - began_s > WAIT_S:
                    raise EngineError(f"no token {WAIT_S} s after `up`: {error}") from error
                await asyncio.sleep(POLL_S)
        first_s = time.monotonic() - began_s
        await starting
        await self.healthy()
        return round(first_s, 1)

    async def healthy(self) -> None:
        """Until every container says so itself."""
        for name in self.project.containers():
            await self.until(partial(self.engine.is_healthy, name), f"{name} healthy")

    async def scale(self, service: str, count: int) -> None:
        # One at a time: podman-compose takes only the last of several.
        words = ["up", "--detach", "--no-build", "--no-recreate", "--scale", f"{service}={count}"]
        await asyncio.to_thread(self.project.compose, *words, service)
        found = self.project.containers(service)
        if len(found) != count:
            raise EngineError(f"{service}={count} was asked for, there are {found}")
        await self.healthy()

    async def kill(self, container: str) -> dict[str, Any]:
        """Under streams, and start it again; nothing else may change."""
        assert self.undisturbed is not None

        async def disturbance() -> None:
            await asyncio.to_thread(self.engine, "kill", "--signal", "KILL", container)
            await asyncio.to_thread(self.engine, "start", container)

        heard = await self.streams.read(self._at, disturbance)
        if not heard.still_under_way:
            raise EngineError(f"{container} came back when all was over: raise --tokens")
        await self.healthy()
        changed = heard.changed(self.undisturbed)
        told = {"killed": container.removeprefix(self.project.name).strip("-_")}
        told |= {"gap_s": heard.gap_s, "changed": changed}  # type: ignore[dict-item]
        print(told, flush=True)
        return told

    def leader(self) -> str:
        """The scheduler that began the last leadership."""
        epochs: dict[str, int] = {}
        for name in self.project.containers("scheduler"):
            told = self.project.log(name)
            events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
            began = [each["epoch"] for each in events if each.get("event") == "leadership.started"]
            epochs[name] = int(max(began, default=0))
        return max(epochs, key=lambda name: epochs[name])

    def probes_ms(self) -> dict[str, float]:
        """CPU time of each service's own health check, the least of three."""
        ports = {"gateway": 50051, "scheduler": 50052, "worker": 50053}
        return {
            service: min(self._probe_ms(service, f"127.0.0.1:{port}") for _ in range(3))
            for service, port in ports.items()
        }

    def memory_mb(self) -> dict[str, float]:
        """What each container holds, as the engine counts it."""
        form = "{{.Name}} {{.MemUsage}}"
        told = self.engine("stats", "--no-stream", "--format", form, *self.project.containers())
        return {
            line.split()[0].removeprefix(self.project.name).strip("-_"): _mb(line.split()[1])
            for line in told.splitlines()
        }

    def _probe_ms(self, service: str, address: str) -> float:
        name = self.project.containers(service)[0]
        told = self.engine("exec", name, "python", "-c", PROBE, "kaiten", "healthcheck", address)
        return round(float(told), 1)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """EngineError when it is in vain."""
        give_up_at = time.monotonic() + WAIT_S
        while not await asyncio.to_thread(condition):
            if time.monotonic() > give_up_at:
                raise EngineError(f"not {what} after {WAIT_S} s")
            await asyncio.sleep(POLL_S)


def _mb(text: str) -> float:
    """`113.2MB`, `1.5GiB`."""
    for unit, factor in (("GiB", 1073.7), ("MiB", 1.0486), ("GB", 1e3), ("MB", 1.0), ("kB", 1e-3)):
        if text.endswith(unit):
            return round(float(text.removesuffix(unit)) * factor, 1)
    return 0.0
