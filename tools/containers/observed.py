"""The compose file's profile `observability` on an engine: what Prometheus fetches, and a trace.

Prometheus must have fetched the page of every replica, found by name, and read all alerts; of one
request Jaeger must have the spans of gateway and scheduler, and know the worker. Where these images
cannot be had, `tools.containers.images --observability` makes some: Debian's Prometheus, and a
collector that answers as Jaeger does (`played_jaeger`). Grafana is not started.
"""

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import yaml

from kaiten.client import AsyncClient
from tools.containers.engine import EngineError
from tools.containers.images import ROOT
from tools.containers.stack import WAIT_S, StackTest

SETTINGS: Final[Mapping[str, str]] = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://jaeger:4317",
    "KAITEN_SCHEDULER_METRICS_PORT": "9464",
    "KAITEN_WORKER_METRICS_PORT": "9464",
}
PARTS: Final = ("prometheus", "jaeger")
PAGES: Final = {"gateway": 1, "scheduler": 2, "worker": 2}
OF_A_REQUEST: Final = {"kaiten.accept", "kaiten.queue", "kaiten.prefill", "kaiten.decode"}
SERVICES: Final = {f"kaiten-{name}" for name in PAGES}


class Eyes:
    """What both answer, asked in their containers."""

    def __init__(self, test: StackTest) -> None:
        self._test = test
        self._container = {name: test.project.containers(name)[0] for name in PARTS}

    def asked(self, part: str, url: str) -> Any:
        told = self._test.engine("exec", self._container[part], "wget", "-q", "-O", "-", url)
        return json.loads(told)["data"]

    def series(self, expr: str) -> list[Any]:
        url = f"http://127.0.0.1:9090/api/v1/query?query={quote(expr)}"
        found: list[Any] = self.asked("prometheus", url)["result"]
        return found

    def pages(self) -> dict[str, int]:
        """How many replicas of each were fetched."""
        counted = self.series("count by (job) (up == 1)")
        return {each["metric"]["job"]: int(each["value"][1]) for each in counted}

    def rules(self) -> set[str]:
        """The alerts that are looked after."""
        groups = self.asked("prometheus", "http://127.0.0.1:9090/api/v1/rules")["groups"]
        return {rule["name"] for group in groups for rule in group["rules"]}

    def services(self) -> set[str]:
        return set(self.asked("jaeger", "http://127.0.0.1:16686/api/services") or ())

    def traces(self) -> list[set[str]]:
        """The names of the spans of each that has one of a gateway."""
        url = "http://127.0.0.1:16686/api/traces?service=kaiten-gateway&limit=100"
        return [
            {span["operationName"] for span in trace["spans"]}
            for trace in self.asked("jaeger", url)
        ]


async def a_request_is_seen(test: StackTest, eyes: Eyes) -> None:
    """A tenth of what nobody will ask about is kept: so until one of them is."""
    try:
        async with asyncio.timeout(WAIT_S), AsyncClient(test.address) as client:
            while not any(names >= OF_A_REQUEST for names in await asyncio.to_thread(eyes.traces)):
                await client.complete("Once upon a time", max_tokens=4)
    except TimeoutError:
        raise EngineError(f"no request's trace after {WAIT_S} s: {eyes.traces()}") from None


async def observability(test: StackTest) -> dict[str, Any]:
    """From `up` to just before `down`; figures. EngineError: what is not seen."""
    await test.up()
    await test.scale("worker", 2)
    await test.scale("scheduler", 2)
    words = ("up", "--detach", "--no-build", "--no-recreate")
    test.project.compose("--profile", "observability", *words, *PARTS)
    await test.healthy()
    eyes = Eyes(test)
    await test.until(lambda: PAGES.items() <= eyes.pages().items(), "every page fetched")
    alerts = yaml.safe_load((ROOT / "deploy" / "observability" / "alerts.yml").read_text())
    named = {rule["alert"] for group in alerts["groups"] for rule in group["rules"]}
    await test.until(lambda: named <= eyes.rules(), "every alert read")

    await a_request_is_seen(test, eyes)
    await test.until(lambda: eyes.services() >= SERVICES, "spans of every service")
    tokens = "sum(vllm:generation_tokens_total)"
    await test.until(lambda: bool(eyes.series(f"{tokens} > 0")), "the tokens counted")
    return {
        "pages": eyes.pages(),
        "alerts": len(named),
        "firing": [each["metric"] for each in eyes.series('ALERTS{alertstate="firing"}')],
        "trace": sorted(next(names for names in eyes.traces() if names >= OF_A_REQUEST)),
        "services": sorted(eyes.services()),
        "memory_mb": test.memory_mb(),
    }
