"""The official JavaScript SDK before a real stack: what openai.test.mjs asks of it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.node_sdk import assert_passes, installed
from tests.support.whole_stack import Door, WholeStack, wait_until

pytestmark = pytest.mark.node


@pytest.fixture
def doors(whole_stack: WholeStack, tmp_path: Path) -> Iterator[dict[str, str]]:
    """What the suite reads from its environment: a gateway of each kind over the same store."""
    keys = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"right").hexdigest()
    keys.write_text(f'[tenants.alice]\nkeys = ["sha256:{digest}"]\n')
    keyed = whole_stack.add_gateway(api_keys_file=keys)
    narrow = whole_stack.add_gateway(streams_max=1)
    empty = whole_stack.add_gateway(cell="empty")
    for door in (keyed, narrow, empty):
        door.process.start()
    keyed.wait_ready()
    narrow.wait_ready()
    wait_until(lambda: _status(empty) == 503, "a gateway that says it cannot serve")
    yield {
        "KAITEN_URL": whole_stack.door.openai,
        "KAITEN_KEYED_URL": keyed.openai,
        "KAITEN_NARROW_URL": narrow.openai,
        "KAITEN_EMPTY_URL": empty.openai,
    }
    for door in (keyed, narrow, empty):
        whole_stack.retire(door)


def _status(door: Door) -> int:
    try:
        return httpx.get(f"{door.openai}/models", timeout=5).status_code
    except httpx.TransportError:
        return 0


def test_openai_node(doors: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    assert_passes("openai.test.mjs", installed(tmp_path_factory), doors)
