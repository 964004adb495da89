"""What each image installs, to the byte: deploy/locks/ROLE.txt, from the ranges of pyproject.toml.

`make lock` asks the package index for the newest versions within the ranges and writes them with
their hashes; build.txt is what builds kaiten itself. torch, triton and CUDA's libraries are not
among them: which build they are is a choice of the place (`TORCH_INDEX`), and pyproject.toml names
their versions exactly. What else torch needs is.
"""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LOCKS: Final = ROOT / "deploy" / "locks"
ROLES: Final = ("gateway", "scheduler", "worker")
# In every image: pages for Prometheus, spans for a collector.
COMMON: Final = ("metrics", "otlp")
BY_PLACE: Final = ("torch", "triton")
# What PyPI's build of torch brings along.
CUDA: Final = re.compile(r"(nvidia|cuda)-")
NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


def requirements(role: str) -> list[str]:
    """Direct ones of an image, as pyproject.toml has them, those that the place chooses too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]

    def of(extra: str) -> Iterator[str]:
        for each in extras[extra]:
            if inner := re.fullmatch(r"kaiten\[([\w,]+)\]", each):
                for name in inner[1].split(","):
                    yield from of(name)
            else:
                yield each

    found = {*project["dependencies"]}
    for extra in (role, *COMMON):
        found |= {*of(extra)}
    return sorted(found)


def without_those_by_place(lock: str) -> str:
    """A lock file less those packages and their hashes."""
    blocks = re.split(r"^(?=\S)", lock, flags=re.M)
    kept = (block for block in blocks if block and not is_by_place(name_of(block)))
    return "".join(kept)


def is_by_place(name: str) -> bool:
    """Whether no lock names it."""
    return name in BY_PLACE or CUDA.match(name) is not None


def name_of(requirement: str) -> str:
    """Normalised as in PEP 503."""
    match = NAME.match(requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def locked(role: str) -> dict[str, str]:
    """Version by name."""
    lines = re.findall(r"^([\w.-]+)==([^\s;\\]+)", (LOCKS / f"{role}.txt").read_text(), re.M)
    return {name_of(name): version for name, version in lines}


def write(name: str, wanted: list[str], *, is_upgrade: bool) -> None:
    """Resolve what is wanted into LOCKS/name.txt; what it names stays unless it is an upgrade."""
    path = LOCKS / f"{name}.txt"
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-"]
    command += ["--python-platform", "linux", "--python-version", "3.11"]
    command += ["--generate-hashes", *(["--upgrade"] if is_upgrade else [])]
    command += ["--no-emit-index-url", "--no-annotate", "--no-header", "--quiet"]
    subprocess.run(
        [*command, "--output-file", str(path)], input="\n".join(wanted), text=True, check=True
    )
    path.write_text(without_those_by_place(path.read_text()))


def main(*words: str) -> None:
    """`--keep`: only what is missing or has left its range changes."""
    LOCKS.mkdir(exist_ok=True)
    is_upgrade = "--keep" not in words
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    write("build", build, is_upgrade=is_upgrade)
    for role in ROLES:
        write(role, requirements(role), is_upgrade=is_upgrade)


if __name__ == "__main__":
    main(*sys.argv[1:])
