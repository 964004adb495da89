"""Whoever watches a core sees it as it is: through whole lives with faults, and however slowly."""

import random
from collections.abc import Mapping
from typing import Any

import pytest

from kaiten.client.live_core import NO_BLOCK, LiveCore
from kaiten.v1.watch_pb2 import WatchResponse
from scheduler_svc.core.commands import Command, Configured, MakePlan
from scheduler_svc.core.outcome import Outcome, PassedOver
from scheduler_svc.core.requests import State
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.workers import Worker
from scheduler_svc.live_view import WAITING_SHOWN_MAX, Moment, View, look
from scheduler_svc.live_view_wire import changes_to_proto
from tests.sim.test_scheduler_sim import World, shared
from tests.support.combinations import covering

SEEDS = 12


class Watcher:
    """Looks at some moments only, as one does who reads slowly."""

    def __init__(self, rng: random.Random, *, takes_rows: bool) -> None:
        self.takes_rows = takes_rows
        self.percent = rng.choice([30, 10, 2])
        self.told: View | None = None
        self.core = LiveCore()
        self.responses = 0

    def take(self, view: View) -> None:
        raw = changes_to_proto(self.told, view, takes_rows=self.takes_rows).SerializeToString()
        said = WatchResponse.FromString(raw)
        assert self.takes_rows or not said.rows
        self.core.take(said)
        self.told = view
        self.responses += 1


class WatchedWorld(World):
    """Every so often somebody looks, and compares what they know with the core."""

    def __init__(self, seed: int, **options: Any) -> None:
        # Dice of their own: the world's life is that of its seed.
        self.dice = random.Random(seed)
        self.watchers = [Watcher(self.dice, takes_rows=takes) for takes in (True, False)]
        self.newest: View | None = None
        self.looks: dict[Worker, tuple[PassedOver, ...]] = {}
        self.commands = 0
        super().__init__(seed, **options)

    def apply(self, command: Command) -> Outcome:
        outcome = super().apply(command)
        self.commands += 1
        if isinstance(command, MakePlan):
            self.looks[self.scheduler.workers[command.worker_id]] = outcome.passed_over
        for watcher in self.watchers:
            if self.dice.randrange(100) < watcher.percent:
                self.watch(watcher)
        return outcome

    def watch(self, watcher: Watcher) -> None:
        moment = Moment(1, self.commands, self.commands, self.now_ns)
        configured = Configured(config=self.scheduler.config, policy="fair")
        # What has not changed is the view's before, whoever was told that one.
        view = look(self.scheduler, moment, configured, self.looks, {}, self.newest)
        self.newest = view
        watcher.take(view)
        fresh = LiveCore()
        view = look(self.scheduler, moment, configured, self.looks, {})
        fresh.take(WatchResponse.FromString(changes_to_proto(None, view).SerializeToString()))
        assert watcher.core == fresh
        compare(fresh, self.scheduler)


def compare(seen: LiveCore, core: Scheduler) -> None:
    """What is seen is what the core has."""
    assert list(seen.queue) == [s.sequence_id for s in core.waiting][:WAITING_SHOWN_MAX]
    assert seen.waiting == len(core.waiting)
    assert seen.workers.keys() == core.workers.keys()
    for worker_id, worker in core.workers.items():
        assert seen.workers[worker_id].blocks_free == worker.kv.free_count
        held = set[int]()
        for sequence in worker.members:
            one = seen.sequences[sequence.sequence_id]
            assert one.place.worker_id == worker_id
            assert one.tables == sequence.kv.blocks
            assert one.counts.num_tokens == sequence.num_tokens
            assert one.counts.num_scheduled_tokens == sequence.num_scheduled_tokens
            assert one.counts.num_computed_tokens == sequence.num_computed_tokens
            held |= {block for table in one.tables for block in table} - {NO_BLOCK}
        # The KV map is whole: whatever is held, somebody who is seen holds.
        assert len(held) == worker.kv.block_count - worker.kv.free_count
    live = [one for request in core._cell.live.values() for one in request.sequences]
    assert seen.sequences.keys() == {
        one.sequence_id for one in live if one.state is not State.FINISHED
    }
    placed = sum(len(worker.members) for worker in core.workers.values())
    nowhere = [one for one in seen.sequences.values() if not one.place.worker_id]
    assert len(seen.sequences) - len(nowhere) == placed
    assert not any(one.tables for one in nowhere)


def watched(seed: int, knobs: Mapping[str, Any] | None = None, **options: Any) -> WatchedWorld:
    world = WatchedWorld(seed, knobs=knobs, **options)
    world.run(turns=40, requests=12)
    world.drain()
    for watcher in world.watchers:
        world.watch(watcher)
        assert not watcher.core.sequences
    return world


@pytest.mark.parametrize("seed", shared(range(SEEDS)))
def test_what_watchers_know_is_the_core(seed: int) -> None:
    watched(seed)


@pytest.mark.parametrize("seed", shared(range(SEEDS // 3)))
@pytest.mark.parametrize("windows", [(None, 12), (5, 30)], ids=str)
def test_the_kv_map_of_several_layer_groups_is_whole(
    seed: int, windows: tuple[int | None, ...]
) -> None:
    """Windows pass over blocks, which are given back in the middle of a table's life."""
    watched(seed, windows=windows, slot_tokens_max=3)


@pytest.mark.parametrize("index", shared(range(6)))
def test_whatever_the_rules(index: int) -> None:
    watched(index, list(covering())[index])
