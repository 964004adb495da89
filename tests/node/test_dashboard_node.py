"""The dashboard's scripts without a browser: what dashboard.test.mjs asks of them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from gateway.openai.operators.watch import core_of
from kaiten.cli.live.cell_view import state_of
from kaiten.client.live_core import LiveCore
from scheduler_svc.core.commands import Configured
from scheduler_svc.live_view import Moment, View, look
from scheduler_svc.live_view_wire import changes_to_proto
from tests.support.cell import Cell, spec
from tests.support.node_sdk import assert_passes

PAGE = Path(__file__).parents[2] / "gateway/openai/pages/dashboard"

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed"),
]


def test_dashboard_node() -> None:
    assert_passes("dashboard.test.mjs", Path(__file__).parent, {"KAITEN_DASHBOARD": str(PAGE)})


@pytest.mark.parametrize("windows", [(None,), (8, None, 16)], ids=str)
def test_a_page_knows_what_a_terminal_does(windows: tuple[int | None, ...], tmp_path: Path) -> None:
    """Of the same responses, whatever is preempted, cancelled or forked, over layer groups."""
    (tmp_path / "told.json").write_text(json.dumps(list(told(windows))))
    told_to = {"KAITEN_DASHBOARD": str(PAGE), "KAITEN_TOLD": str(tmp_path / "told.json")}
    assert_passes("told.test.mjs", Path(__file__).parent, told_to)


def told(windows: tuple[int | None, ...]) -> Iterator[dict[str, Any]]:
    """Events of a cell that is short of blocks, each with what a client makes of all until then."""
    random, core, before = Random(20261128), LiveCore(), None
    cell = Cell(*[spec(slots=4, blocks=32, block_size=4, windows=windows) for _ in range(2)])
    states = set()
    for number in range(1, 60):
        for _ in range(random.randrange(3)):
            cell.submit(random.randrange(1, 40), random.randrange(1, 60), n=random.choice([1, 3]))
        cell.cancel(random.randrange(1, 30))
        cell.turns(random.randrange(4))
        view = seen(cell, number, before)
        response, before = changes_to_proto(before, view), view
        core.take(response)
        states |= {state_of(one) for one in core.sequences.values()}
        yield {"told": json.loads(msgspec.json.encode(core_of(response))), "known": known(core)}
    assert states >= {"running", "waiting", "preempted", "forking"}


def seen(cell: Cell, number: int, before: View | None) -> View:
    moment = Moment(epoch=7, seq=number, committed_seq=number, unix_ns=number * 1_000_000_000)
    configured = Configured(config=cell.scheduler.config, policy="fair")
    return look(cell.scheduler, moment, configured, {}, {}, before)


def known(core: LiveCore) -> dict[str, Any]:
    return {
        "queue": core.queue,
        "sequences": {
            str(id): [
                one.identity.id,
                state_of(one),
                one.place.worker_id,
                one.counts.num_tokens,
                one.counts.num_computed_tokens,
                one.tables,
            ]
            for id, one in core.sequences.items()
        },
    }
