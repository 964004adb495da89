"""The dashboard's scripts without a browser: what dashboard.test.mjs asks of them."""

import shutil
from pathlib import Path

import pytest

from tests.support.node_sdk import assert_passes

PAGE = Path(__file__).parents[2] / "gateway/openai/pages/dashboard"

pytestmark = pytest.mark.node


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_dashboard_node() -> None:
    assert_passes("dashboard.test.mjs", Path(__file__).parent, {"KAITEN_DASHBOARD": str(PAGE)})
