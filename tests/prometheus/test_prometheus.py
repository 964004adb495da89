"""A real Prometheus fetches from a real `kaiten serve`, and every query of ours gives series.

The stack is made to do a little of everything that is counted: it completes, streams, refuses,
cancels, preempts, and sends its spans to a collector.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.support.served import Served
from tests.support.whole_stack import wait_until
from tools import dashboards

pytest.importorskip("opentelemetry.exporter.prometheus", reason="kaiten[metrics] is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="no kaiten[otlp] here")
from tests.support.collector import collecting

pytestmark = [
    pytest.mark.prometheus,
    pytest.mark.skipif(
        not shutil.which("prometheus"), reason="no prometheus here: apt install prometheus"
    ),
]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
WORDS = "--metrics-port 0 --num-blocks 40 --max-num-seqs 8 --log-level warning"
# Seconds between two fetches.
SCRAPE_S = 1
SHIPPED = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
RUNBOOKS = "https://runbooks.example/kaiten.md"
ALERTS = {
    rule["alert"]: rule["expr"]
    for group in yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}


class Prometheus:
    """One that fetches from these pages, by job, with the rules that are shipped."""

    def __init__(self, folder: Path, pages: dict[str, list[str]]) -> None:
        self._folder = folder
        config = {
            "global": {
                **SHIPPED["global"],
                "scrape_interval": f"{SCRAPE_S}s",
                "evaluation_interval": "1s",
            },
            "alerting": SHIPPED["alerting"],
            "rule_files": [str(FOLDER / "alerts.yml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": targets}]}
                for job, targets in pages.items()
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (folder / "log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                # It says which port the system gave it.
                "--web.listen-address=127.0.0.1:0",
                # Since 3.0 they always are.
                "--enable-feature=expand-external-labels",
            ],
            env=os.environ | {"KAITEN_RUNBOOKS_URL": RUNBOOKS},
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.url = ""
        wait_until(self._is_listening, "Prometheus listens")

    def _is_listening(self) -> bool:
        said = (self._folder / "log").read_text()
        assert self._process.poll() is None, said
        import psutil

        for one in psutil.Process(self._process.pid).net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                self.url = f"http://127.0.0.1:{one.laddr.port}"
        with suppress(httpx.TransportError):
            return bool(self.url) and httpx.get(f"{self.url}/-/ready").status_code == 200
        return False

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """The series that it gives now."""
        reply = httpx.get(f"{self.url}/api/v1/query", params={"query": expr}, timeout=30).json()
        assert reply["status"] == "success", (expr, reply)
        result: list[dict[str, Any]] = reply["data"]["result"]
        return result

    def gives(self, expr: str, what: str) -> None:
        """Wait for its series: each page is fetched at a moment of its own, a rate wants two."""
        wait_until(lambda: self.ask(expr), f"{what} has series: {expr}")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def stir(served: Served) -> None:
    """Something of everything: more than fits, so that some are preempted; and a refusal."""
    url = f"{served.http_url}/v1/completions"
    with httpx.Client(timeout=60) as client:
        body = {"model": "kaiten-mini", "prompt": "The chef said", "ignore_eos": True}
        assert client.post(url, json={**body, "max_tokens": 150, "n": 8}).status_code == 200
        assert client.post(url, json={**body, "max_tokens": 0}).status_code == 400
        is_cut = False
        # Once more if it was over before its client left.
        while not is_cut:
            asked = {**body, "max_tokens": 600, "stream": True}
            with client.stream("POST", url, json=asked) as reply:
                first = next(each for each in reply.iter_lines() if each.startswith("data: "))
            id = json.loads(first.removeprefix("data: "))["id"]

            def ended(url: str = f"{served.http_url}/v1/requests/{id}/explain") -> str:
                (choice,) = client.get(url).json()["choices"]
                return str(choice["ended"] or "")

            wait_until(ended, "its end")
            is_cut = ended() == "cancelled"


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with collecting() as collector:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.address,
            "OTEL_METRICS_EXPORTER": "none",
        }
        folder = tmp_path_factory.mktemp("stack")
        with Served(folder / "data", *WORDS.split(), environ=environ) as served:
            (shown,) = re.findall(r"metrics +(http.*)", served.said)
            gateway, *schedulers, worker = [f"127.0.0.1:{p}" for p in re.findall(r":(\d+)", shown)]
            pages = {"gateway": [gateway], "scheduler": schedulers, "worker": [worker]}
            found = Prometheus(tmp_path_factory.mktemp("prometheus"), pages)
            try:
                # A rate wants two fetches with something in between.
                wait_until(lambda: len(found.ask("up == 1")) == 4, "all pages are fetched")
                stir(served)
                # What has no value before its first event is an increase from the second on.
                wait_until(lambda: found.ask("kaiten_abort_to_free_seconds_count"), "a cancel")
                stir(served)
                wait_until(
                    lambda: found.ask("rate(kaiten_abort_to_free_seconds_count[1m]) > 0"),
                    "another one",
                )
                assert found.ask("sum(kaiten_num_preemptions_total) > 0")
                yield found
            finally:
                found.stop()


def test_every_page_is_fetched_whole(prometheus: Prometheus) -> None:
    # A fetch has a second: a page of a part that is put aside meanwhile comes with the next one.
    whole = "count(up == 1 and scrape_samples_scraped > 0) == 4"
    prometheus.gives(whole, "every page")
    # As many as are useful; who adds labels without bound is noticed here.
    assert not prometheus.ask("scrape_samples_scraped > 1500")


@pytest.mark.parametrize("name", dashboards.DASHBOARDS)
def test_every_panel_has_series(prometheus: Prometheus, name: str) -> None:
    _, panels = dashboards.DASHBOARDS[name]
    for panel in panels:
        for expr, _ in panel.asks:
            # What Grafana puts in there is four fetches and more.
            prometheus.gives(expr.replace("$__rate_interval", "1m"), panel.title)


def test_every_alert_measures_something_and_none_fires(prometheus: Prometheus) -> None:
    for name, expr in ALERTS.items():
        prometheus.gives(re.sub(r" [<>] [\d.]+$", "", expr), name)
    firing = [each["metric"] for each in prometheus.ask('ALERTS{alertstate="firing"}')]
    assert not firing


def test_it_is_told_where_runbooks_are(prometheus: Prometheus) -> None:
    told = httpx.get(f"{prometheus.url}/api/v1/status/config").json()["data"]["yaml"]
    assert yaml.safe_load(told)["global"]["external_labels"] == {"runbooks": RUNBOOKS}


def test_the_names_of_vllm_are_there_with_the_models_name(prometheus: Prometheus) -> None:
    """What KEDA's scalers and dashboards made for vLLM ask for."""
    for name in ("num_requests_waiting", "kv_cache_usage_perc", "generation_tokens_total"):
        prometheus.gives(f'{{__name__="vllm:{name}", model_name="kaiten-mini"}}', name)
    prometheus.gives("max(kaiten_queue_time_forecast_seconds)", "the forecast")
