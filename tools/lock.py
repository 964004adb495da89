"""What each image installs, to the byte: deploy/locks/ROLE.txt, from the ranges of pyproject.toml.

`make lock` asks the package index for the newest versions within the ranges and writes them with
their hashes. torch and triton are not among them: which build they are is a choice of the place
(`TORCH_INDEX`), and pyproject.toml names their versions exactly.
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
NAME: Final = re.compile(r"[A-Za-z0-9_.-]+")


def requirements(role: str) -> list[str]:
    """Direct ones of an image, as pyproject.toml has them."""
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
    return sorted(each for each in found if name_of(each) not in BY_PLACE)


def name_of(requirement: str) -> str:
    """Normalised as in PEP 503."""
    match = NAME.match(requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def locked(role: str) -> dict[str, str]:
    """Version by name."""
    lines = re.findall(r"^([\w.-]+)==([^\s;\\]+)", (LOCKS / f"{role}.txt").read_text(), re.M)
    return {name_of(name): version for name, version in lines}


def main() -> None:
    LOCKS.mkdir(exist_ok=True)
    for role in ROLES:
        command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-"]
        command += ["--python-platform", "linux", "--python-version", "3.11"]
        command += ["--generate-hashes", "--upgrade"]
        command += ["--no-emit-index-url", "--no-annotate", "--no-header", "--quiet"]
        subprocess.run(
            [*command, "--output-file", str(LOCKS / f"{role}.txt")],
            input="\n".join(requirements(role)),
            text=True,
            check=True,
        )


if __name__ == "__main__":
    main()
