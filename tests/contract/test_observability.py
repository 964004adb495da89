"""Dashboards, alerts, runbooks and the collector's file fit together and what the services tell."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from service_kit.metric_aliases import ALIASES
from service_kit.telemetry import SLOW_FIRST_TOKEN_US, SLOW_STEP_US
from tests.contract.test_metrics_page import instruments
from tools import dashboards

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "observability"
(GROUP,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
ALERTS: Final[Mapping[str, Mapping[str, Any]]] = {rule["alert"]: rule for rule in GROUP["rules"]}
JAEGER = yaml.safe_load((FOLDER / "jaeger.yml").read_text())
# Of each component's configuration, as its own repository has it, what the file uses: its fields,
# and whether they are numbers, switches, durations, addresses, or one of some words.
COUNT, SWITCH, SPAN, PLACE, TEXT = (
    r"\d+",
    "True|False",
    r"\d+(ms|s|m|h)",
    r"(http://)?[\w.]+:\d+",
    ".+",
)
SHARE: Final = r"\d+(\.\d+)?"
POLICY: Final = {
    "name": TEXT,
    "type": "status_code|numeric_attribute|probabilistic",
    "status_code": {"status_codes": ["OK|ERROR|UNSET"]},
    "numeric_attribute": {"key": TEXT, "min_value": COUNT, "max_value": COUNT},
    "probabilistic": {"sampling_percentage": SHARE},
}
COMPONENTS: Final[Mapping[str, Any]] = {
    "healthcheckv2": {"use_v2": SWITCH, "http": {"endpoint": PLACE}},
    "jaeger_storage": {
        "backends": {"*": {"memory": {"max_traces": COUNT}}},
        "metric_backends": {
            "*": {
                "prometheus": {
                    "endpoint": PLACE,
                    "normalize_calls": SWITCH,
                    "normalize_duration": SWITCH,
                }
            }
        },
    },
    "jaeger_query": {"storage": {"traces": TEXT, "metrics": TEXT}, "http": {"endpoint": PLACE}},
    "otlp": {"protocols": {"grpc": {"endpoint": PLACE, "max_recv_msg_size_mib": COUNT}}},
    "memory_limiter": {"check_interval": SPAN, "limit_mib": COUNT, "spike_limit_mib": COUNT},
    "tail_sampling": {
        "decision_wait": SPAN,
        "num_traces": COUNT,
        "expected_new_traces_per_sec": COUNT,
        "policies": [POLICY],
    },
    "batch": {},
    "spanmetrics": {"metrics_flush_interval": SPAN},
    "forward": {},
    "jaeger_storage_exporter": {"trace_storage": TEXT},
    "prometheus": {"endpoint": PLACE},
}
NAME = re.compile(r"\b(?:kaiten|gen_ai|vllm:)[a-z0-9_]*")
has_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here")


def asked() -> Iterator[str]:
    """Every expression of dashboards and alerts."""
    for _, panels in dashboards.DASHBOARDS.values():
        yield from (expr for panel in panels for expr, _ in panel.asks)
    yield from (rule["expr"] for rule in ALERTS.values())


@pytest.mark.parametrize("name", dashboards.DASHBOARDS)
def test_a_dashboard_is_what_its_table_says(name: str) -> None:
    told = (dashboards.FOLDER / f"{name}.json").read_text()
    assert told == dashboards.text(name), "python -m tools.dashboards"


@pytest.mark.parametrize("name", dashboards.DASHBOARDS)
def test_grafana_knows_every_field_of_a_dashboard(name: str) -> None:
    """Read and written by Grafana's own types, all of it is still there."""
    pytest.importorskip("grafana_foundation_sdk", reason="grafana-foundation-sdk is missing")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    ours = dashboards.dashboard(name)

    def known(some: dict[str, Any]) -> Any:
        return json.loads(JSONEncoder().encode(Dashboard.from_json(some)))

    assert list(lost(ours, known(ours))) == []
    ours["panels"][0]["targets"][0]["exprr"] = ours["refersh"] = "1"
    assert list(lost(ours, known(ours))) == ["refersh", "exprr"], "a mistake is noticed"


def lost(ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict):
        yield from (key for key in ours if key not in theirs)
        for key in ours.keys() & theirs.keys():
            yield from lost(ours[key], theirs[key])
    elif isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            yield from lost(one, other)
    elif ours != theirs:
        yield f"{ours} became {theirs}"


def test_what_is_asked_for_is_told_by_some_service() -> None:
    told = instruments() | {name for names in ALIASES.values() for name in names}
    names = {name for expr in asked() for name in NAME.findall(expr)}
    assert len(names) > 40
    assert not {re.sub("_(bucket|count|sum)$", "", name) for name in names} - told


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_is_the_matter_and_where_to_read_on(name: str) -> None:
    rule = ALERTS[name]
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"]["summary"]
    where = "{{ with $externalLabels.runbooks }}{{ . }}{{ else }}docs/runbooks.md{{ end }}"
    assert rule["annotations"]["runbook_url"] == f"{where}#{name.lower()}"
    assert re.search(r" [<>] [\d.]+$", rule["expr"]), "what is measured, and a number"


def test_every_alert_has_its_runbook_and_every_runbook_its_alert() -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text()
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == list(ALERTS)
    assert f"{len(ALERTS)} alerts" in (ROOT / "deploy" / "README.md").read_text()


def test_the_collectors_pipelines_are_made_of_what_is_there() -> None:
    service, connectors = JAEGER["service"], JAEGER["connectors"].keys()
    kinds = {
        "receivers": JAEGER["receivers"].keys() | connectors,
        "processors": JAEGER["processors"].keys(),
        "exporters": JAEGER["exporters"].keys() | connectors,
    }
    used = {kind: set[str]() for kind in kinds}
    for pipeline in service["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= kinds[kind], names
            used[kind] |= set(names)
    assert used == {kind: set(names) for kind, names in kinds.items()}, "nothing is left over"
    # What is counted is all, before most of it goes.
    assert "tail_sampling" not in service["pipelines"]["traces"]["processors"]
    assert "spanmetrics" in service["pipelines"]["traces"]["exporters"]
    assert set(service["extensions"]) == JAEGER["extensions"].keys()


def test_the_collector_knows_every_field_of_its_file() -> None:
    """As far as it can be told without the collector, which no registry that installs has."""
    sections = ("extensions", "receivers", "processors", "connectors", "exporters")
    assert JAEGER.keys() == {*sections, "service"}
    used = {name: said for section in sections for name, said in JAEGER[section].items()}
    assert used.keys() == COMPONENTS.keys()
    assert [*misfits(used, COMPONENTS)] == []
    storage, query = used["jaeger_storage"], used["jaeger_query"]["storage"]
    assert {query["traces"], used["jaeger_storage_exporter"]["trace_storage"]} == {
        *storage["backends"]
    }
    assert {query["metrics"]} == {*storage["metric_backends"]}
    assert used["memory_limiter"]["spike_limit_mib"] < used["memory_limiter"]["limit_mib"]
    for policy in used["tail_sampling"]["policies"]:
        assert policy.keys() == {"name", "type", policy["type"]}, "its settings are of its type"
    wrong = {"tail_sampling": {"decision_wait": 10, "policies": [{"naem": "x"}]}}
    assert [*misfits(wrong, COMPONENTS)] == [
        "tail_sampling.decision_wait: 10",
        "tail_sampling.policies.naem",
    ]


def test_what_the_collector_keeps_leaves_it_room_for_more() -> None:
    """Its limiter refuses spans while the process has more than the difference of the two; what is
    in the store stays there until others take its place.
    """
    # Go keeps a link in 80 bytes and a pointer; and what an iteration's and a step's span have.
    trace_bytes = 256 * 88 + 1500
    kept = JAEGER["extensions"]["jaeger_storage"]["backends"]["spans"]["memory"]["max_traces"]
    limiter = JAEGER["processors"]["memory_limiter"]
    assert kept * trace_bytes < (limiter["limit_mib"] - limiter["spike_limit_mib"]) << 20


def misfits(said: Any, known: Any, path: str = "") -> Iterator[str]:
    """Where the file says what its reader has no field for, or no such value."""
    if isinstance(known, list) and isinstance(said, list):
        for one in said:
            yield from misfits(one, known[0], path)
    elif isinstance(known, Mapping) and isinstance(said or {}, Mapping):
        for name, inner in (said or {}).items():
            here = f"{path}.{name}".lstrip(".")
            if (field := known.get(name, known.get("*"))) is None:
                yield here
            else:
                yield from misfits(inner, field, here)
    elif not isinstance(known, str) or not re.fullmatch(known, str(said)):
        yield f"{path}: {said}"


def test_what_the_collector_keeps_is_what_the_services_say() -> None:
    """Attributes that spans have, and the same numbers."""
    policies = {each["name"]: each for each in JAEGER["processors"]["tail_sampling"]["policies"]}
    numbers = {
        policy["numeric_attribute"]["key"]: policy["numeric_attribute"]["min_value"]
        for policy in policies.values()
        if policy["type"] == "numeric_attribute"
    }
    assert numbers == {
        "kaiten.preemptions": 1,
        "kaiten.rows.preempted": 1,
        "kaiten.first_token_us": SLOW_FIRST_TOKEN_US,
        "kaiten.worker.forward_us": SLOW_STEP_US,
    }
    sources = [ROOT / "gateway" / "observe" / "tracing.py", ROOT / "scheduler_svc" / "tracing.py"]
    text = "".join(path.read_text() for path in sources)
    assert all(f'"{name}"' in text for name in numbers)
    assert policies["failed"]["status_code"] == {"status_codes": ["ERROR"]}
    assert {policy["type"] for policy in policies.values()} == {
        "numeric_attribute",
        "probabilistic",
        "status_code",
    }


@has_promtool
def test_promtool_has_nothing_to_say() -> None:
    for words in (["config", "prometheus.yml"], ["rules", "alerts.yml"]):
        ran = subprocess.run(
            ["promtool", "check", *words], cwd=FOLDER, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr


# By alert: series that fire it, in promtool's notation, a value each minute; and some that do not.
FIRES: Final[Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]]] = {
    "KaitenTargetDown": ({'up{job="worker",instance="w"}': "0x40"}, {'up{job="worker"}': "1x40"}),
    "KaitenNoLeader": ({"kaiten_is_leader": "0x40"}, {"kaiten_is_leader": "1x40"}),
    "KaitenTwoLeaders": (
        {'kaiten_is_leader{i="a"}': "1x40", 'kaiten_is_leader{i="b"}': "1x40"},
        {'kaiten_is_leader{i="a"}': "1x40", 'kaiten_is_leader{i="b"}': "0x40"},
    ),
    "KaitenLeaderChanges": (
        # One scheduler that leads anew, in another process, before each look at it.
        {"kaiten_leader_epoch": "100+9x40", "kaiten_leader_changes_total": "1x40"},
        {'kaiten_leader_epoch{i="a"}': "100x20 stale", 'kaiten_leader_epoch{i="b"}': "_x21 900x20"},
    ),
    "KaitenNoWorkers": ({"kaiten_num_workers": "0x40"}, {"kaiten_num_workers": "2x40"}),
    "KaitenGatewayNotReady": (
        {'kaiten_gateway_is_ready{instance="g"}': "0x40"},
        {'kaiten_gateway_is_ready{instance="g"}': "1x40"},
    ),
    "KaitenStalled": ({"kaiten_stalled_seconds": "11x40"}, {"kaiten_stalled_seconds": "9x40"}),
    "KaitenStoreSlow": (
        {"kaiten_journal_lag_seconds": "3x40"},
        {"kaiten_journal_lag_seconds": "0.1x40"},
    ),
    "KaitenFoldLag": ({"kaiten_fold_lag": "30000x40"}, {"kaiten_fold_lag": "500x40"}),
    "KaitenQueueTooLong": (
        {"kaiten_queue_time_forecast_seconds": "40x40"},
        {"kaiten_queue_time_forecast_seconds": "5x40"},
    ),
    "KaitenSlowFirstToken": (
        {
            'gen_ai_server_time_to_first_token_seconds_bucket{le="10"}': "0+1x40",
            'gen_ai_server_time_to_first_token_seconds_bucket{le="60"}': "0+2x40",
            'gen_ai_server_time_to_first_token_seconds_bucket{le="+Inf"}': "0+2x40",
        },
        {
            'gen_ai_server_time_to_first_token_seconds_bucket{le="10"}': "0+2x40",
            'gen_ai_server_time_to_first_token_seconds_bucket{le="60"}': "0+2x40",
            'gen_ai_server_time_to_first_token_seconds_bucket{le="+Inf"}': "0+2x40",
        },
    ),
    "KaitenRefusing": (
        {'kaiten_gateway_requests_refused_total{code="RESOURCE_EXHAUSTED"}': "0+60x40"},
        {'kaiten_gateway_requests_refused_total{code="INVALID_ARGUMENT"}': "0+60x40"},
    ),
    "KaitenErrors": (
        {'kaiten_request_success_total{finished_reason="error"}': "0+1x40"},
        {'kaiten_request_success_total{finished_reason="stop"}': "0+1x40"},
    ),
    "KaitenInternalErrors": (
        {'kaiten_gateway_requests_refused_total{code="INTERNAL"}': "0+1x40"},
        {'kaiten_gateway_requests_refused_total{code="INTERNAL"}': "7x40"},
    ),
    "KaitenWorkerCrashes": (
        {'kaiten_workers_lost_total{how="crash"}': "0+1x40"},
        {'kaiten_workers_lost_total{how="leave"}': "0+1x40"},
    ),
    "KaitenRowErrors": (
        {'kaiten_worker_row_errors_total{instance="w"}': "0+1x40"},
        {'kaiten_worker_row_errors_total{instance="w"}': "2x40"},
    ),
    "KaitenPreempting": (
        {"kaiten_num_preemptions_total": "0+60x40", "kaiten_request_success_total": "0+60x40"},
        {"kaiten_num_preemptions_total": "0+6x40", "kaiten_request_success_total": "0+60x40"},
    ),
    "KaitenDeviceMemoryFull": (
        {
            'kaiten_worker_device_memory_bytes{instance="w",state="used"}': "99x40",
            'kaiten_worker_device_memory_bytes{instance="w",state="total"}': "100x40",
        },
        {
            'kaiten_worker_device_memory_bytes{instance="w",state="used"}': "90x40",
            'kaiten_worker_device_memory_bytes{instance="w",state="total"}': "100x40",
        },
    ),
    "KaitenLeaderBusy": (
        {
            'kaiten_iteration_time_seconds_total{part="plan"}': "0+30x40",
            'kaiten_iteration_time_seconds_total{part="book"}': "0+25x40",
        },
        {'kaiten_iteration_time_seconds_total{part="forward"}': "0+60x40"},
    ),
    "KaitenSpansDropped": (
        {'kaiten_spans_dropped_total{job="worker",by="sender"}': "0+1x40"},
        {'kaiten_spans_dropped_total{job="worker",by="sender"}': "9x40"},
    ),
    "KaitenCertificateEnds": (
        {'kaiten_certificate_expiry_timestamp_seconds{flag="--tls-cert"}': "1000000x40"},
        {'kaiten_certificate_expiry_timestamp_seconds{flag="--tls-cert"}': "2000000x40"},
    ),
}


LINKED: Final = "KaitenNoLeader"
# And a cell of which no page is there: who is gone for good has no target that is down either.
TELL_OF_SILENCE: Final = ("KaitenNoLeader", "KaitenGatewayNotReady")
URL: Final = "https://runbooks.example/kaiten.md"


def fires(name: str, case: int) -> dict[str, Any]:
    """By the first of its series it does, by the second it does not."""
    return {
        "interval": "1m",
        "input_series": [{"series": k, "values": v} for k, v in FIRES[name][case].items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": "30m",
                "exp_samples": [] if case else [{"labels": "{}", "value": 1}],
            }
        ],
    }


def linked(told: str, where: str) -> dict[str, Any]:
    """By what Prometheus is told of where the runbooks are, an alert's link."""
    annotations = ALERTS[LINKED]["annotations"]
    link = f"{where}#{LINKED.lower()}"
    alert = {
        "exp_labels": ALERTS[LINKED]["labels"],
        "exp_annotations": {**annotations, "runbook_url": link},
    }
    return {
        "interval": "1m",
        "external_labels": {"runbooks": told} if told else {},
        "input_series": [{"series": k, "values": v} for k, v in FIRES[LINKED][0].items()],
        "alert_rule_test": [{"alertname": LINKED, "eval_time": "30m", "exp_alerts": [alert]}],
    }


@has_promtool
def test_every_alert_fires_when_it_should_and_not_when_it_should_not(tmp_path: Path) -> None:
    """By Prometheus' own rule tester, half an hour into made-up series."""
    assert FIRES.keys() == ALERTS.keys()
    for name, rule in ALERTS.items():
        # Alone: with all rules in one file each test would evaluate those of all others.
        rules, tests = tmp_path / f"{name}.yml", [fires(name, 0), fires(name, 1)]
        if name in TELL_OF_SILENCE:
            tests += [{**fires(name, 0), "input_series": []}]
        if name == LINKED:
            tests += [linked("", "docs/runbooks.md"), linked(URL, URL)]
        rules.write_text(yaml.safe_dump({"groups": [{**GROUP, "rules": [rule]}]}))
        (tmp_path / f"{name}.test.yml").write_text(
            yaml.safe_dump({"rule_files": [str(rules)], "tests": tests})
        )
    files = map(str, tmp_path.glob("*.test.yml"))
    ran = subprocess.run(
        ["promtool", "test", "rules", *files], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
