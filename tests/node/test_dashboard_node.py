"""The dashboard's scripts without a browser: what dashboard.test.mjs asks of them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "gateway/openai/pages/dashboard"
SUITE_S_MAX = 120

pytestmark = pytest.mark.node


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_dashboard_node() -> None:
    done = subprocess.run(
        ["node", "--test", "--test-reporter=spec", "dashboard.test.mjs"],
        cwd=Path(__file__).parent,
        env=os.environ | {"KAITEN_DASHBOARD": str(PAGE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SUITE_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    # A suite that was not found is no suite that passed.
    assert "ℹ fail 0" in done.stdout
    assert "ℹ pass 0" not in done.stdout
