"""What makes an environment an image, its bill of materials, and a machine without an engine."""

import json
import os
import subprocess
import sys
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.proto", reason="no kaiten[otlp] here")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from deploy.image import sbom, slim
from tests.support.collector import Collector
from tools import lock
from tools.containers import compose_test, images, played_jaeger
from tools.containers.engine import SKIPPED, EngineError, find

LOCK = """\
grpcio==1.85.1 \\
    --hash=sha256:{0} \\
    --hash=sha256:{1}
torch==2.13.0 \\
    --hash=sha256:{1}
nvidia-cublas==13.1 ; platform_machine == 'x86_64' \\
    --hash=sha256:{0}
numpy==2.4.6 \\
    --hash=sha256:{1}
""".format("a" * 64, "b" * 64)


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def installed(site: Path, name: str, version: str, *lines: str) -> PathDistribution:
    about = [f"Name: {name}", f"Version: {version}", *lines]
    folder = site / f"{name}-{version}.dist-info"
    write(folder / "METADATA", "\n".join(["Metadata-Version: 2.4", *about, ""]))
    return PathDistribution(folder)


def test_what_no_service_reads_is_taken_out_and_nothing_else(tmp_path: Path) -> None:
    gone = [
        write(tmp_path / name, "x")
        for name in (
            "pip/__init__.py",
            "torch/include/c10/core.h",
            "torch/bin/test_api",
            "torch/nn/functional.pyi",
            "numpy/linalg/tests/test_linalg.py",
            "grpc/__pycache__/__init__.cpython-311.pyc",
        )
    ]
    kept = [
        write(tmp_path / name, "x")
        for name in (
            "pipeline/__init__.py",
            "torch/testing/__init__.py",
            "torch/bin/torch_shm_manager",
            "torch/lib/libtorch_cpu.so",
            "numpy/testing/__init__.py",
            "hf_xet/hf_xet.so",
            "kaiten/mini/checkpoint/model.safetensors",
        )
    ]
    slim.slim("worker", tmp_path)
    assert [path for path in gone if path.exists()] == []
    assert [path for path in kept if not path.exists()] == []
    slim.slim("gateway", tmp_path)
    assert [path.exists() for path in kept] == [True] * 5 + [False] * 2


def test_what_is_left_is_compiled_for_a_root_that_nobody_can_write(tmp_path: Path) -> None:
    source = write(tmp_path / "one" / "module.py", "answer = 42\n")
    coloured = write(tmp_path / "pygments" / "lexers" / "c.py", "answer = 42\n")
    slim.compile_all(tmp_path)
    (compiled,) = (source.parent / "__pycache__").iterdir()
    # Flags 0b01: by the text's hash, which nobody compares; so no time is in it.
    assert compiled.read_bytes()[4:8] == b"\x01\0\0\0"
    assert not (coloured.parent / "__pycache__").exists()


def test_a_bill_of_materials_names_what_is_there_and_where_it_may_be_from(tmp_path: Path) -> None:
    packages = [
        installed(tmp_path, "grpcio", "1.85.1", "License-Expression: Apache-2.0"),
        installed(tmp_path, "kaiten", "0.2.0"),
        installed(tmp_path, "torch", "2.13.0+cpu", "License: BSD-3-Clause"),
    ]
    told = sbom.bill(packages, LOCK)
    assert told["metadata"]["component"]["purl"] == "pkg:pypi/kaiten@0.2.0"
    grpcio, torch = told["components"]
    assert grpcio["licenses"] == [{"expression": "Apache-2.0"}]
    (source,) = grpcio["externalReferences"]
    assert [each["content"] for each in source["hashes"]] == ["a" * 64, "b" * 64]
    assert torch["purl"] == "pkg:pypi/torch@2.13.0%2Bcpu"
    assert torch["licenses"] == [{"license": {"name": "BSD-3-Clause"}}]
    assert "externalReferences" not in torch
    assert sbom.bill([*reversed(packages)], LOCK) == told


def test_no_lock_names_what_the_place_chooses() -> None:
    left = lock.without_those_by_place(LOCK)
    assert left.split("==")[0] == "grpcio"
    assert left.count("--hash") == 3
    assert "numpy" in left
    assert "torch" not in left
    assert "nvidia" not in left


def test_what_plays_jaeger_answers_in_its_form() -> None:
    collector = Collector()
    spans = [Span(span_id=bytes([n]), trace_id=b"\xab" * 16, name=f"span-{n}") for n in range(2)]
    service = KeyValue(key="service.name", value=AnyValue(string_value="kaiten-gateway"))
    told = ResourceSpans(
        resource=Resource(attributes=[service]), scope_spans=[ScopeSpans(spans=spans)]
    )
    collector.Export(ExportTraceServiceRequest(resource_spans=[told]), None)
    named = [{"operationName": "span-0"}, {"operationName": "span-1"}]
    assert played_jaeger.traces(collector) == [{"traceID": "ab" * 16, "spans": named}]
    assert {*collector.services.values()} == {"kaiten-gateway"}


def test_what_an_image_is_made_without_is_known_by_name() -> None:
    assert images.left_out("gateway") == {"pip", "setuptools", "hf-xet"}
    assert images.left_out("worker") == {"pip", "setuptools"}


@pytest.mark.parametrize("module", [images, compose_test], ids=lambda module: module.__name__)
def test_a_machine_without_an_engine_is_skipped_not_green(module: object) -> None:
    command = [sys.executable, "-m", module.__name__]  # type: ignore[attr-defined]
    environment = {**os.environ, "PATH": "/nowhere"}
    done = subprocess.run(
        command, cwd=images.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == SKIPPED
    assert "skipped" in done.stdout
    assert "docker: not installed; podman: not installed" in done.stdout


def program(folder: Path, name: str, script: str) -> None:
    write(folder / name, f"#!/bin/sh\n{script}\n").chmod(0o755)


def test_an_engine_that_does_not_answer_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    program(tmp_path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    program(tmp_path, "podman", "exit 0")
    assert find().program == "podman"
    with pytest.raises(EngineError, match="Cannot connect to the Docker daemon"):
        find("docker")


def test_a_base_image_that_is_not_there_is_said_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, "podman", '[ "$1" != pull ] || { echo "manifest unknown" >&2; exit 125; }')
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(EngineError, match=r"none:1 is neither here nor to be had: name another"):
        images.base_there(find("podman"), "none:1")


def test_an_image_that_is_not_as_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = lock.locked("scheduler")
    others = [{"name": name, "version": version} for name, version in locked.items()]
    write(tmp_path / "bill", json.dumps({"components": others}))
    look = f'case "$*" in *cat*) cat {tmp_path}/bill;; *) echo 10001;; esac'
    program(tmp_path, "podman", look)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(images, "SBOM", tmp_path / "sbom")
    engine = find("podman")
    assert images.looked_into(engine, "scheduler")["packages"] == len(locked)
    assert (tmp_path / "sbom" / "scheduler.cdx.json").exists()
    program(tmp_path, "podman", look.replace("echo 10001", "echo /usr/bin/gcc; echo 0"))
    with pytest.raises(EngineError, match=r"/usr/bin/gcc"):
        images.looked_into(engine, "scheduler")
    others[0]["version"] = "0.0.1"
    write(tmp_path / "bill", json.dumps({"components": others}))
    with pytest.raises(EngineError, match=rf"{others[0]['name']}.*0\.0\.1"):
        images.looked_into(engine, "scheduler")
