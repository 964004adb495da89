"""The manifests of deploy/kubernetes: what the cluster takes, and what the services understand."""

import copy
import json
import os
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from gateway.grpc import scaler
from gateway.openai import health
from gateway.settings import GatewaySettings
from gpu_worker.settings import WorkerSettings
from scheduler_svc.settings import SchedulerSettings
from service_kit.grpc_health import LIVE, REGISTERED
from service_kit.lifecycle import STOP_S_MAX
from service_kit.settings import Settings
from service_kit.settings import load as load_settings
from tests.contract.test_metrics_page import instruments
from tests.support.compose import NEEDED, ROOT
from tests.support.compose import load as load_compose
from tools.containers import kustomize

OVERLAYS: Final = ("cpu", "gpu", "observability", "keda", "keda-push")
COMPONENTS: Final = ("api-keys", "managed-store")
SETTINGS: Final[dict[str, type[Settings]]] = {
    "gateway": GatewaySettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}
NAME: Final = "app.kubernetes.io/name"
# The oldest that knows a preStop of sleep, and the newest that the validator has.
OLDEST: Final = "1.30"
needs_kustomize = pytest.mark.skipif(not kustomize.program(), reason="no kubectl here")
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)
each_of_ours = pytest.mark.parametrize("role", SETTINGS)


@cache
def rendered(overlay: str) -> list[kustomize.Document]:
    return kustomize.render(kustomize.FOLDER / "overlays" / overlay)


@cache
def written() -> list[kustomize.Document]:
    """As the files say it, before any patch: needs no program."""
    files = sorted((kustomize.FOLDER / "base").glob("*.yaml"))
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def found(documents: list[kustomize.Document], kind: str, name: str) -> kustomize.Document:
    (one,) = [
        each
        for each in documents
        if (each["kind"], each.get("metadata", {}).get("name")) == (kind, name)
    ]
    return one


def pods(documents: list[kustomize.Document]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of the workload, and what its pods are made by."""
    for each in documents:
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield each["metadata"]["name"], each["spec"]["template"]["spec"]


def pod(role: str) -> dict[str, Any]:
    return dict(pods(written()))[role]


def variables(role: str) -> dict[str, str]:
    """What a secret or the cluster adds is made up."""
    made_up = {"secretKeyRef": "redis://kaiten:a0password@valkey:6379/0", "resourceFieldRef": "4"}
    return {
        each["name"]: each.get("value") or made_up[next(iter(each["valueFrom"]))]
        for each in pod(role)["containers"][0]["env"]
    }


def problems(document: kustomize.Document, version: str) -> list[str]:
    return problems_of(json.dumps(document), version)


@cache
def problems_of(text: str, version: str) -> list[str]:
    """Most documents are in several overlays."""
    import kubernetes_validate

    document = json.loads(text)
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{document['kind']} {document['metadata']['name']}: {error}"]
    return []


@needs_kustomize
@each_overlay
def test_the_cluster_knows_every_field(overlay: str) -> None:
    import kubernetes_validate

    for document in rendered(overlay):
        if document["apiVersion"] == "keda.sh/v1alpha1":
            assert keda_problems(document) == []
        else:
            for version in (OLDEST, kubernetes_validate.latest_version()):
                assert problems(document, version) == []


@needs_kustomize
def test_a_mistake_in_a_manifest_is_noticed() -> None:
    wrong = copy.deepcopy(found(rendered("cpu"), "Deployment", "gateway"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    assert "readynessProbe" in problems(wrong, OLDEST)[0]
    wrong = copy.deepcopy(found(rendered("keda"), "ScaledObject", "worker"))
    wrong["spec"]["triggers"][0]["treshold"] = wrong["spec"]["cooldown"] = "2"
    assert keda_problems(wrong) == ["cooldown", "treshold"]
    wrong["spec"]["maxReplicaCount"] = "many"
    assert "maxReplicaCount" in keda_problems(wrong)[0]


def keda_problems(document: kustomize.Document) -> list[str]:
    """By types made from the schema of KEDA's own definitions: fields that they do not know, or
    what is not of the type that they say."""
    from cloudcoil.models.keda.v1alpha1 import ScaledObject
    from pydantic import ValidationError

    try:
        known = ScaledObject.model_validate(document)
    except ValidationError as error:
        return [".".join(map(str, each["loc"])) for each in error.errors()]
    return list(lost(document, json.loads(known.model_dump_json(by_alias=True, exclude_none=True))))


def lost(ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, dict):
        yield from (key for key in ours if key not in theirs)
        for key in ours.keys() & theirs.keys():
            yield from lost(ours[key], theirs[key])
    elif isinstance(ours, list):
        for one, other in zip(ours, theirs, strict=True):
            yield from lost(one, other)


@needs_kustomize
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_fits_the_overlays(component: str, tmp_path: Path) -> None:
    for overlay in ("gpu", "keda"):
        names = {"resources": f"overlays/{overlay}", "components": f"components/{component}"}
        paths = {
            key: [os.path.relpath(kustomize.FOLDER / name, tmp_path.resolve())]
            for key, name in names.items()
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(paths))
        documents = kustomize.render(tmp_path.resolve())
        assert not [each for document in documents for each in problems_of_ours(document)]
        names_of_pods = dict(pods(documents))
        assert ("valkey" in names_of_pods) is (component != "managed-store")
        has_keys = "/keys/keys.toml" in str(names_of_pods["gateway"])
        assert has_keys is (component == "api-keys")


def problems_of_ours(document: kustomize.Document) -> list[str]:
    return [] if document["kind"] == "ScaledObject" else problems(document, OLDEST)


@each_of_ours
def test_the_environment_is_understood(role: str) -> None:
    given = variables(role)
    chosen: Any = load_settings(SETTINGS[role], role, [], given)
    assert chosen.grpc_port
    assert str(chosen.peer_credential_file) == "/peers/credential"


def test_every_variable_is_a_setting_and_none_is_the_clusters() -> None:
    text = "".join(path.read_text() for path in kustomize.FOLDER.rglob("*.yaml"))
    told = set(re.findall(r"KAITEN_(GATEWAY|SCHEDULER|WORKER)_([A-Z_]+[A-Z])", text))
    assert len(told) > 20
    unknown = {
        name for role, name in told if name.lower() not in SETTINGS[role.lower()].model_fields
    }
    assert unknown == set()
    # KAITEN_GATEWAY_SERVICE_HOST and the like, of a Service that somebody calls kaiten-gateway.
    assert all(spec["enableServiceLinks"] is False for _, spec in pods(written()))


def test_what_is_scaled_by_is_told_by_the_services() -> None:
    (scaled,) = yaml.safe_load_all((kustomize.FOLDER / "components/keda/worker.yaml").read_text())
    queries = [each["metadata"]["query"] for each in scaled["spec"]["triggers"]]
    names = {name for query in queries for name in re.findall(r"kaiten_\w+", query)}
    assert len(names) == 3
    assert names <= instruments()
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Scaling")[2]
    assert all(query in page for query in queries), "and are those that the page says"
    # Without workers nothing else wakes one, and whoever waits longer than one starts is not ended.
    assert all(
        each["metadata"]["activationThreshold"] == "0" for each in scaled["spec"]["triggers"]
    )
    patch = (kustomize.FOLDER / "components/keda/kustomization.yaml").read_text()
    waits_s = int(re.findall(r'ACCEPT_WITHOUT_WORKERS, value: "(\d+)"', patch)[0])
    probe = pod("worker")["containers"][0]["startupProbe"]
    assert waits_s >= probe["periodSeconds"] * probe["failureThreshold"]


def test_what_gateways_tell_keda_is_what_it_is_told_to_ask_for() -> None:
    component = kustomize.FOLDER / "components/keda-push/kustomization.yaml"
    (scaled, _) = yaml.safe_load(component.read_text())["patches"]
    (patch,) = yaml.safe_load(scaled["patch"])
    asked = [each["metadata"] for each in patch["value"]]
    targets = [scaler.targets(metadata) for metadata in asked]
    assert {name for some in targets for name in some} == {*scaler.SIGNALS}
    defaults = {name: signal.target for name, signal in scaler.SIGNALS.items()}
    assert {name: target for some in targets for name, target in some.items()} == defaults
    assert {f"kaiten_{name}" for name in scaler.SIGNALS} <= instruments()
    page = (ROOT / "docs" / "metrics.md").read_text().partition("## Scaling")[2]
    assert all(name in page for name in scaler.SIGNALS)
    # In the namespace and at the port of the Service that is the gateways' own.
    door = found(written(), "Service", "kaiten")
    (port,) = [each["port"] for each in door["spec"]["ports"] if each["name"] == "grpc"]
    assert {metadata["scalerAddress"] for metadata in asked} == {f"kaiten.kaiten.svc:{port}"}


@each_of_ours
def test_stopping_takes_no_longer_than_the_grace(role: str) -> None:
    spec = pod(role)
    before_s = spec["containers"][0].get("lifecycle", {"preStop": {"sleep": {"seconds": 0}}})
    drain_s = SETTINGS[role].model_fields["drain_s"].default
    needed_s = before_s["preStop"]["sleep"]["seconds"] + drain_s + STOP_S_MAX
    assert spec["terminationGracePeriodSeconds"] >= needed_s


@each_of_ours
def test_probes_ask_what_there_is_to_be_asked(role: str) -> None:
    container = pod(role)["containers"][0]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    prefix = f"KAITEN_{role.upper()}"
    given = variables(role)
    assert ports["grpc"] == int(given[f"{prefix}_GRPC_PORT"])
    for name, says in (("http", "HTTP"), ("metrics", "METRICS")):
        assert name not in ports or ports[name] == int(given[f"{prefix}_{says}_PORT"])
    (service,) = [
        each for each in written() if each["kind"] == "Service" and each["metadata"]["name"] == role
    ]
    assert {each["port"] for each in service["spec"]["ports"]} <= set(ports.values())
    paths = {operation.path for operation in health.OPERATIONS}
    ready = REGISTERED if role == "worker" else ""
    for probe, asked in (
        ("startupProbe", LIVE),
        ("livenessProbe", LIVE),
        ("readinessProbe", ready),
    ):
        if "httpGet" in container[probe]:
            path = container[probe]["httpGet"]["path"]
            assert path in paths
            assert path == ("/livez" if asked == LIVE else "/readyz")
        else:
            assert container[probe]["grpc"]["port"] == ports["grpc"]
            assert container[probe]["grpc"].get("service", "") == asked


@needs_kustomize
@each_overlay
def test_a_rollout_waits_for_as_long_as_a_start_may_take(overlay: str) -> None:
    for role in SETTINGS:
        deployment = found(rendered(overlay), "Deployment", role)["spec"]
        probe = deployment["template"]["spec"]["containers"][0]["startupProbe"]
        start_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert deployment.get("progressDeadlineSeconds", 600) > start_s, role


def test_prometheus_finds_pods_that_are_not_ready() -> None:
    """A headless Service leads to none of them by itself: no alert would hear of any in trouble."""
    config = yaml.safe_load((ROOT / "deploy" / "observability" / "prometheus.yml").read_text())
    by_name = [one for job in config["scrape_configs"] for one in job.get("dns_sd_configs", ())]
    names = {name for one in by_name for name in one["names"]} - {"worker-gpu"}
    assert names == SETTINGS.keys()
    for name in names:
        service = found(written(), "Service", name)["spec"]
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True), name


@each_of_ours
def test_pods_that_are_not_ready_keep_no_node_from_being_drained(role: str) -> None:
    """While the store or the last worker is away no gateway is ready; a budget that counts them as
    disrupted would hold the very node that has to go for it to come back.
    """
    budget = found(written(), "PodDisruptionBudget", role)["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@needs_kustomize
@each_overlay
def test_a_pod_can_do_no_more_than_it_must(overlay: str) -> None:
    for name, spec in pods(rendered(overlay)):
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        # One that misbehaves ends alone.
        assert container["resources"]["limits"]["memory"]
        assert container["resources"]["requests"]["cpu"]


def test_a_pod_is_bounded_before_any_overlay_says_so() -> None:
    for name, spec in pods(written()):
        assert spec["containers"][0]["resources"]["limits"]["memory"], name


# Who calls whom, and where.
CALLS: Final = {
    ("gateway", "valkey", 6379),
    ("gateway", "scheduler", 50052),
    ("scheduler", "valkey", 6379),
    ("scheduler", "scheduler", 50052),
    ("scheduler", "worker", 50053),
    ("worker", "scheduler", 50052),
}
WATCHES: Final = {
    ("gateway", "jaeger", 4317),
    ("scheduler", "jaeger", 4317),
    ("worker", "jaeger", 4317),
    ("prometheus", "gateway", 8000),
    ("prometheus", "scheduler", 9464),
    ("prometheus", "worker", 9464),
    ("prometheus", "jaeger", 8888),
    ("prometheus", "jaeger", 8889),
    ("grafana", "prometheus", 9090),
    ("grafana", "jaeger", 16686),
    ("jaeger", "prometheus", 9090),
}


@needs_kustomize
@each_overlay
def test_who_calls_whom_is_let_through_and_nobody_else(overlay: str) -> None:
    documents = rendered(overlay)
    names = [name for name, _ in pods(documents)]
    policies = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]
    wanted = CALLS | (WATCHES if "prometheus" in names else set())
    ports = {port for _, _, port in wanted}
    let_through = {
        (one, other, port)
        for one, other, port in product(names, names, ports)
        if is_allowed(policies, "egress", one, other, port)
        and is_allowed(policies, "ingress", other, one, port)
    }
    assert let_through == wanted
    assert not is_allowed(policies, "egress", "gateway", "somebody", 443)


def is_allowed(policies: list[Any], way: str, pod: str, peer: str, port: int) -> bool:
    """As a cluster decides it: what no policy of the pod allows is closed."""
    mine = [each for each in policies if way.title() in each["policyTypes"]]
    mine = [each for each in mine if selects(each["podSelector"], pod)]
    assert mine, f"{pod} is open"
    key = {"egress": "to", "ingress": "from"}[way]
    return any(
        any(each["port"] == port for each in rule["ports"])
        and any(
            selects(each.get("podSelector"), peer) for each in rule.get(key, [{"podSelector": {}}])
        )
        for each in mine
        for rule in each.get(way, [])
    )


def selects(selector: dict[str, Any] | None, name: str) -> bool:
    if selector is None:
        return False
    labels = selector.get("matchLabels", {NAME: name})
    rules = selector.get("matchExpressions", [])
    assert all((rule["key"], rule["operator"]) == (NAME, "In") for rule in rules)
    return labels == {NAME: name} and all(name in rule["values"] for rule in rules)


@needs_kustomize
def test_containers_are_those_of_the_compose_file() -> None:
    """Versions, users and commands."""
    services = load_compose(NEEDED)["services"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for name, spec in [*pods(rendered("observability")), *pods(rendered("gpu"))]:
        (container,) = spec["containers"]
        service = services["worker-gpu" if "gpu" in container["image"] else name]
        image = service["image"]
        assert container["image"] == (f"{image}:{version}" if "build" in service else image)
        context = spec["securityContext"]
        assert f"{context['runAsUser']}:{context['runAsGroup']}" == service["user"]
        command = [*container.get("command", []), *container.get("args", [])]
        assert [simple(word) for word in command] == [
            simple(word) for word in service.get("command", [])
        ]


def simple(word: str) -> str:
    return word.replace("/valkey-", "/")
