"""What `kaiten watch` says of a cell, line by line."""

import pytest

from kaiten.cli.live.cell_view import choices
from kaiten.cli.live.watch import fitting, lines_of
from kaiten.client.live_core import LiveCore
from kaiten.v1.common_pb2 import WhyPassedOver
from kaiten.v1.ledger_pb2 import ConfiguredInput
from kaiten.v1.watch_pb2 import (
    InFlightPlan,
    PassedOver,
    SequenceCounts,
    SequenceIdentity,
    SequencePassedOver,
    SequencePlace,
    SequenceState,
    SequenceTables,
    WatchedQueue,
    WatchedSequence,
    WatchedTable,
    WatchedWorker,
    WatchResponse,
)

State, Why = SequenceState, WhyPassedOver


def sequence(
    sequence_id: int,
    state: SequenceState,
    counts: tuple[int, int, int],
    blocks: list[int] | None = None,
    **place: str | int,
) -> WatchedSequence:
    known, scheduled, computed = counts
    groups = [] if blocks is None else [WatchedTable(block_ids=blocks)]
    return WatchedSequence(
        sequence_id=sequence_id,
        identity=SequenceIdentity(id=f"acme:{sequence_id}", num_prompt_tokens=3, tokens_max=50),
        place=SequencePlace(state=state, **place),  # type: ignore[arg-type]
        counts=SequenceCounts(
            num_tokens=known, num_scheduled_tokens=scheduled, num_computed_tokens=computed
        ),
        tables=SequenceTables(groups=groups),
    )


def cell() -> LiveCore:
    full = PassedOver(worker_id="w1", stage="place", why=Why.WHY_PASSED_OVER_NO_SLOT)
    waits = sequence(5, State.SEQUENCE_STATE_PREEMPTED, (9, 0, 0))
    short = PassedOver(worker_id="w1", stage="admit", why=Why.WHY_PASSED_OVER_BLOCKS)
    waits.passed_over.CopyFrom(SequencePassedOver(by=[short]))
    core, running = LiveCore(), State.SEQUENCE_STATE_RUNNING
    core.take(
        WatchResponse(
            is_snapshot=True,
            epoch=7,
            seq=12,
            committed_seq=10,
            configured=ConfiguredInput(policy="fair"),
            workers=[
                WatchedWorker(
                    worker_id="w1",
                    address="host:1",
                    slots_max=2,
                    block_count=40,
                    blocks_free=30,
                    is_late=True,
                    plans=[InFlightPlan(plan_id=3, lease_steps=8, steps_answered=2)],
                    passed_over=[full],
                ),
                WatchedWorker(
                    worker_id="w2",
                    slots_max=4,
                    block_count=4,
                    blocks_free=4,
                    host_block_count=9,
                    host_blocks_used=3,
                ),
            ],
            sequences=[
                sequence(2, running, (6, 5, 4), [7, 0], worker_id="w1"),
                sequence(1, State.SEQUENCE_STATE_RETIRING, (50, 49, 47), [], worker_id="w1"),
                sequence(3, running, (9, 8, 8), [0, 1, 2, 9, 8, 20, 21], worker_id="w1", slot=1),
                waits,
                sequence(6, State.SEQUENCE_STATE_FORKING, (3, 0, 0)),
            ],
            queue=WatchedQueue(sequence_ids=[5], length=3),
        )
    )
    return core


def test_a_cell_as_lines() -> None:
    assert "\n".join(lines_of(cell())) == (
        "epoch 7  record 12 (2 uncommitted)  fair  3 waiting\n"
        "worker host:1 (w1)  2 of 2 slots  30 of 40 blocks free  plans 3 (2 of 8 steps)  late"
        "  every slot is taken\n"
        "  retiring  acme:1/0  computed 47, scheduled 49, tokens 50 of 50\n"
        "  slot 0  acme:2/0  computed 4, scheduled 5, tokens 6 of 50\n"
        "  slot 1  acme:3/0  computed 8, scheduled 8, tokens 9 of 50\n"
        "worker w2  0 of 4 slots  4 of 4 blocks free, 3 of 9 in host memory used  plans none\n"
        "waiting 1  preempted  acme:5/0  computed 0, scheduled 0, tokens 9 of 50"
        "  host:1: too few blocks are free\n"
        "forking  acme:6/0  computed 0, scheduled 0, tokens 3 of 50\n"
        "and 2 more"
    )


@pytest.mark.parametrize(("sequence_id", "map"), [(1, "[]"), (2, "[7 0]"), (3, "[0-2 9 8 20-21]")])
def test_the_kv_map_is_shown_in_runs(sequence_id: int, map: str) -> None:
    (line,) = (e for e in lines_of(cell(), with_blocks=True) if f"acme:{sequence_id}/" in e)
    assert line.endswith(f"  {map}")


def test_a_state_that_only_newer_services_know_is_told_by_its_number() -> None:
    core, later = cell(), 9
    core.sequences[3].place.state = later  # type: ignore[assignment]
    assert any("state 9  acme:3/0" in line for line in lines_of(core))
    assert "state 9" in [each.state for each in choices(core)]


def test_a_long_queue_does_not_push_the_workers_out_of_sight() -> None:
    lines = ["cell", "worker", "12345678", "waits", "waits"]
    assert fitting(lines, 8, 6) == lines
    assert fitting(lines, 4, 6) == ["cell", "worker", "and 3 more lines"], (
        "lines that wrap are more"
    )
    assert fitting(lines, 8, 5) == ["cell", "worker", "12345678", "and 2 more lines"]
