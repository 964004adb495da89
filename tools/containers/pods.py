"""Pods for `podman kube play`, derived from what kustomize makes of deploy/kubernetes.

What podman has no part for is translated, and nothing else: workloads become single pods; claims,
empty directories and secrets that are files become folders of this machine, as podman 4 takes the
former two late and makes the latter readable to all; probes and hooks are left out of what it is
given, and `probe` asks them. Images are those that `make images` left here.
"""

import base64
import copy
import json
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tools.containers.engine import ANSWER_S, Engine
from tools.containers.kustomize import Document

PROBES: Final = ("startupProbe", "livenessProbe", "readinessProbe")
Secrets = Mapping[str, Mapping[str, str]]


def workloads(documents: list[Document]) -> dict[str, Document]:
    return {
        each["metadata"]["name"]: each
        for each in documents
        if each["kind"] in ("Deployment", "StatefulSet")
    }


def config_maps(documents: list[Document]) -> list[Document]:
    return [each for each in documents if each["kind"] == "ConfigMap"]


class Pods:
    """Under one network; a folder holds what their volumes are. Names begin with `project`."""

    def __init__(
        self,
        engine: Engine,
        project: str,
        folder: Path,
        documents: list[Document],
        secrets: Secrets,
        tag: str,
    ) -> None:
        self._engine = engine
        self.project = project
        self._folder = folder
        self._documents = documents
        self._secrets = secrets
        self._tag = tag
        self.running: dict[str, str] = {}
        engine("network", "create", project)
        for name, values in secrets.items():
            # What podman reads variables from: values in base64, by their keys.
            coded = {
                key: base64.b64encode(value.encode()).decode() for key, value in values.items()
            }
            file = folder / f"{name}.json"
            file.write_text(json.dumps(coded))
            engine("secret", "create", self._secret(name), str(file))

    def start(self, workload: str, pod: str, ip: str = "") -> None:
        """One more pod of a workload, under its Service's name and perhaps that one's address."""
        file = self._folder / f"{pod}.json"
        file.write_text("\n---\n".join(json.dumps(each) for each in self._played(workload, pod)))
        network = f"{self.project}:alias={workload}" + (f",ip={ip}" if ip else "")
        self._engine("kube", "play", "--network", network, str(file), timeout_s=600)
        self.running[pod] = workload

    def stop(self, pod: str) -> None:
        """As a cluster ends one: its hook, SIGTERM, and the time that its grace leaves."""
        spec = self._spec(self.running.pop(pod))
        before_s = 0
        if "lifecycle" in spec["containers"][0]:
            before_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
            self._engine("exec", self.container(pod), "sleep", str(before_s), is_checked=False)
        left_s = spec["terminationGracePeriodSeconds"] - before_s
        name = f"{self.project}-{pod}"
        self._engine("pod", "stop", "--time", str(left_s), name, timeout_s=left_s + ANSWER_S)
        self._engine("pod", "rm", "--force", name)

    def probe(self, pod: str, which: str) -> bool:
        """What the probe of the manifest says now."""
        spec = self._spec(self.running.get(pod, pod.rpartition("-")[0]))["containers"][0]
        asked = spec[which]
        if "httpGet" in asked:
            ports = {each["name"]: each["containerPort"] for each in spec["ports"]}
            port = ports[asked["httpGet"]["port"]]
            return _answers(f"http://{self.address(pod)}:{port}{asked['httpGet']['path']}")
        if "grpc" in asked:
            words = ["kaiten", "healthcheck", f"127.0.0.1:{asked['grpc']['port']}"]
            if service := asked["grpc"].get("service"):
                words += ["--service", service]
        else:
            words = asked["exec"]["command"]
        done = subprocess.run(
            [self._engine.program, "exec", self.container(pod), *words],
            capture_output=True,
            timeout=ANSWER_S,
            check=False,
        )
        return done.returncode == 0

    def address(self, pod: str) -> str:
        form = '{{(index .NetworkSettings.Networks "' + self.project + '").IPAddress}}'
        infra = self._engine(
            "pod", "inspect", "--format", "{{.InfraContainerID}}", f"{self.project}-{pod}"
        )
        return self._engine("inspect", "--format", form, infra.strip()).strip()

    def container(self, pod: str) -> str:
        name = self._spec(self.running.get(pod, pod.rpartition("-")[0]))["containers"][0]["name"]
        return f"{self.project}-{pod}-{name}"

    def logs(self, pod: str) -> str:
        words = [self._engine.program, "logs", "--tail", "30", self.container(pod)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def remove(self) -> None:
        """All of it, whatever state it is in."""
        for pod in self.running:
            name = f"{self.project}-{pod}"
            self._engine("pod", "rm", "--force", "--time", "2", name, is_checked=False)
        for name in self._secrets:
            self._engine("secret", "rm", self._secret(name), is_checked=False)
        self._engine("network", "rm", "--force", self.project, is_checked=False)

    def _secret(self, name: str) -> str:
        return f"{self.project}-{name}"

    def _spec(self, workload: str) -> dict[str, Any]:
        spec: dict[str, Any] = workloads(self._documents)[workload]["spec"]["template"]["spec"]
        return spec

    def _played(self, workload: str, pod: str) -> list[Document]:
        document = workloads(self._documents)[workload]
        spec = copy.deepcopy(self._spec(workload))
        (container,) = spec["containers"]
        # Ports it would take on this machine, too.
        for left_out in (*PROBES, "lifecycle", "ports"):
            container.pop(left_out, None)
        spec.pop("topologySpreadConstraints", None)
        if not container["image"].startswith("valkey/"):
            container["image"] = f"localhost/{container['image'].partition(':')[0]}:{self._tag}"
        for each in container["env"]:
            if reference := each.get("valueFrom", {}).get("secretKeyRef"):
                reference["name"] = self._secret(reference["name"])
        claims = document["spec"].get("volumeClaimTemplates", [])
        volumes = spec.setdefault("volumes", [])
        volumes += [{"name": claim["metadata"]["name"], "claim": True} for claim in claims]
        owner = spec["securityContext"]["runAsUser"]
        spec["volumes"] = [self._volume(each, workload, pod, owner) for each in volumes]
        labels = document["spec"]["template"]["metadata"]["labels"]
        metadata = {"name": f"{self.project}-{pod}", "labels": labels}
        played = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        # Names of generated maps end in a digest, so several projects may have the same.
        return [*config_maps(self._documents), played]

    def _volume(self, volume: dict[str, Any], workload: str, pod: str, owner: int) -> Any:
        name = volume["name"]
        if "configMap" in volume:
            return {"name": name, "configMap": {**volume["configMap"], "optional": False}}
        # A claim outlives its pod.
        folder = self._folder / (workload if "claim" in volume else pod) / name
        folder.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            for key, value in self._secrets[volume["secret"]["secretName"]].items():
                file = folder / key
                file.write_text(value)
                file.chmod(volume["secret"]["defaultMode"])
                # Of root and the pod's group, as a cluster makes it.
                shutil.chown(file, 0, owner)
        else:
            shutil.chown(folder, owner, owner)
        return {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
