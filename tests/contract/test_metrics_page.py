"""docs/metrics.md lists every instrument of every service, no other, and the names of others."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from opentelemetry.metrics import Meter, NoOpMeter

from gateway.observe import metrics as gateway
from gpu_worker.service import metrics as worker
from gpu_worker.service.loading import Loaded
from gpu_worker.service.process import WorkerProcess
from scheduler_svc import meters as scheduler
from service_kit.metrics import count_spans, tell_expiries
from service_kit.telemetry import Spans

ROOT = Path(__file__).parents[2]
UNITS = {"": "", "s": "_seconds", "By": "_bytes"}
METRIC = re.compile(r"(?<![\w/.-])kaiten_[a-z0-9_]+[a-z0-9](?![\w/(-])")
NAME = re.compile(r"`((?:kaiten|gen_ai)_[a-z0-9_]+)(?:\{([a-z_,]+)\})?`")


class Listed(NoOpMeter):
    """Writes down what is made of it, as Prometheus names it."""

    def __init__(self) -> None:
        super().__init__("kaiten")
        self.names: set[str] = set()

    def _note(self, name: str, unit: str, suffix: str = "") -> None:
        assert unit in UNITS, f"{name}: a unit that this test does not know: {unit}"
        self.names.add(name.replace(".", "_") + UNITS[unit] + suffix)

    def create_histogram(self, name: str, unit: str = "", *args: Any, **kwargs: Any) -> Any:
        self._note(name, unit)
        return super().create_histogram(name, unit, *args, **kwargs)

    def create_observable_counter(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Any:
        assert description, name
        self._note(name, unit, "_total")
        return super().create_observable_counter(name, callbacks, unit, description)

    def create_observable_gauge(
        self, name: str, callbacks: Any = None, unit: str = "", description: str = ""
    ) -> Any:
        assert description, name
        self._note(name, unit)
        return super().create_observable_gauge(name, callbacks, unit, description)


def instruments() -> set[str]:
    """Of all three services, as they make them; of a gateway's process those of its `main`."""
    meter = Listed()
    some: Any = None
    count_spans(meter, cast(Spans, some or object()))
    tell_expiries(meter)
    scheduler.Meters(cast(Meter, meter), with_tenants=True)
    gateway.Meters(cast(Meter, meter), model="m")
    gateway.BatchMeters(cast(Meter, meter), lambda: 0)
    loaded = cast(Loaded, SimpleNamespace(device=None))
    WorkerProcess._look_at(some, worker.Meters(cast(Meter, meter)), some, some, loaded)
    main = (ROOT / "gateway" / "main.py").read_text()
    for kind, name in re.findall(r'create_observable_(\w+)\(\s*"([a-z._]+)"', main):
        meter._note(name, "", "_total" if kind == "counter" else "")
    return meter.names


def listed() -> set[str]:
    page = (ROOT / "docs" / "metrics.md").read_text()
    tables = page.partition("## Scaling")[0]
    rows = [line for line in tables.splitlines() if line.startswith("| `")]
    first = [line.split("|")[1] for line in rows]
    return {name for cell in first for name, _ in NAME.findall(cell)}


def test_the_page_lists_what_there_is() -> None:
    made, told = instruments(), listed()
    assert len(made) > 50
    assert not made - told, "not in docs/metrics.md"
    assert not told - made, "in docs/metrics.md, and nobody counts it"


def test_no_page_names_a_metric_that_nobody_counts() -> None:
    """Nor a query in a page, an alert's or a dashboard's."""
    made = instruments()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.y*ml")]
    named = {
        (page.name, name)
        for page in pages
        for name in METRIC.findall(page.read_text())
        if not {name, re.sub(r"_(bucket|sum|count)$", "", name), f"{name}_total"} & made
    }
    assert named == set()


def test_the_page_lists_the_names_of_others() -> None:
    pytest.importorskip("prometheus_client", reason="kaiten[metrics] is not installed")
    from service_kit.metric_aliases import ALIASES

    page = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(
        r"^\| ((?:`vllm:[a-z0-9_]+`(?:, )?)+) \| `([a-z0-9_]+)` \|", page, re.MULTILINE
    )
    told = {ours: tuple(re.findall(r"`([^`]+)`", theirs)) for theirs, ours in rows}
    assert told == ALIASES
