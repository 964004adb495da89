"""The official JavaScript SDK, as tests/node pins it, installed outside the tree."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.support.once import made_once

SUITE: Final = Path(__file__).parents[1] / "node"
NPM_S_MAX: Final = 120
# What npm says when it could not reach the registry, or one that has not all of it; all else is a
# fault of ours.
UNREACHABLE: Final = re.compile(
    r"E404|ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EHOSTUNREACH|ENETUNREACH|E5\d\d|network"
)


def installed(factory: pytest.TempPathFactory) -> Path:
    """A copy of tests/node with its node_modules, one for all tests; without node, skip."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt install nodejs npm")
    return made_once(factory, "openai-node", _install)


def _install(folder: Path) -> None:
    shutil.copytree(SUITE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.py", "__*"))
    command = ["npm", "ci", "--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(
        [*command, "--fetch-retries=1", "--fetch-timeout=20000"],
        cwd=folder,
        env={key: value for key, value in os.environ.items() if key != "SSL_CERT_DIR"},
        capture_output=True,
        text=True,
        timeout=NPM_S_MAX,
        check=False,
    )
    if done.returncode != 0:
        said = done.stderr[-1000:]
        if UNREACHABLE.search(said):
            pytest.skip(f"the npm registry cannot be reached: {said}")
        pytest.fail(f"npm ci: {said}")


def assert_passes(suite: str, folder: Path, environ: Mapping[str, str]) -> None:
    """By node's own runner. How long it may take is what any test may."""
    done = subprocess.run(
        ["node", "--test", "--test-reporter=spec", suite],
        cwd=folder,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    # A suite that was not found is no suite that passed.
    assert "ℹ fail 0" in done.stdout
    assert "ℹ pass 0" not in done.stdout
