"""Who is suspected of the deaths of workers, who is convicted, and what clears a record."""

from dataclasses import replace

from scheduler_svc.core.types import Reason
from tests.support.cell import Cell, spec


class Poisoned:
    """A cell whose workers die at the first step with the poison in the batch."""

    def __init__(self, n: int = 1) -> None:
        self.cell = Cell()
        self.innocents = [self.cell.submit(3, 6) for _ in range(3)]
        self.poison = self.cell.submit(3, 6, n=n)
        self.choices = range(self.poison, self.poison + n)
        self.deaths = 0

    def run(self) -> None:
        for _ in range(500):
            if not self.cell.scheduler.live_count:
                break
            if not self.cell.workers:
                self.cell.join(f"w{self.deaths}", spec())
            (worker_id,) = self.cell.workers
            while self.cell.plan(worker_id) is not None:
                pass
            running = self.cell.running(worker_id)
            if any(sequence_id in running for sequence_id in self.choices):
                self.deaths += 1
                self.cell.kill(worker_id)
            else:
                self.cell.turn()
        assert not self.cell.scheduler.live_count
        self.cell.turns(3)


def test_poison_is_convicted_alone_and_the_innocent_survive() -> None:
    scene = Poisoned()
    scene.run()
    assert scene.deaths == 3
    assert scene.cell.reason(scene.poison) is Reason.ERROR
    error = scene.cell.endings[scene.poison].error
    assert error == "3 workers were lost computing this request, the last: killed"
    assert all(scene.cell.reason(sequence_id) is Reason.LENGTH for sequence_id in scene.innocents)


def test_of_how_many_deaths_a_verdict_speaks_does_not_change_with_the_bound() -> None:
    scene = Poisoned()
    config = replace(scene.cell.configured.config, deaths_max=5)
    scene.cell.apply(replace(scene.cell.configured, config=config))
    scene.run()
    assert scene.deaths == 3
    assert scene.cell.endings[scene.poison].error.startswith("3 workers were lost")


def test_all_choices_of_a_poisoned_prompt_are_convicted_together() -> None:
    scene = Poisoned(n=8)
    scene.run()
    assert scene.deaths == 3
    assert all(scene.cell.reason(sequence_id) is Reason.ERROR for sequence_id in scene.choices)


def test_a_conviction_passes_over_choices_that_had_ended() -> None:
    scene = Poisoned(n=2)
    scene.cell.cancel(scene.poison, choice=1)
    scene.run()
    assert scene.cell.reason(scene.poison) is Reason.ERROR
    assert scene.cell.reason(scene.poison + 1) is Reason.CANCELLED


def test_suspects_are_tried_one_at_a_time() -> None:
    cell = Cell()
    first, second = cell.submit(3, 6), cell.submit(3, 6)
    for worker_id in ("a", "b"):
        cell.join(worker_id, spec())
        cell.must_plan(worker_id)
        assert cell.running(worker_id) == [first, second]
        cell.kill(worker_id)
    cell.join("c", spec())
    assert cell.must_plan("c").admitted == (first,)
    cell.step("c")  # a token: acquitted
    assert cell.must_plan("c").admitted == (second,)
    cell.finish()


def test_a_suspect_does_not_block_those_behind_it() -> None:
    cell = Cell()
    first, second = cell.submit(3, 6), cell.submit(3, 6)
    for worker_id in ("a", "b"):
        cell.join(worker_id, spec())
        cell.must_plan(worker_id)
        cell.kill(worker_id)
    third = cell.submit(3, 6)
    cell.join("c", spec())
    assert cell.must_plan("c").admitted == (first, third)
    assert cell.waiting() == [second]
    cell.finish()


def test_a_suspect_does_not_wait_for_a_worker_that_has_another() -> None:
    """Seen: it had fewer rows, so it was left to it, which passed it over, and all behind it."""
    cell = Cell(spec(slots=4))
    others = [cell.submit(3, 90) for _ in range(4)]
    cell.turn()
    first, second = cell.submit(3, 6), cell.submit(3, 6)
    for worker_id in ("a", "b"):
        cell.join(worker_id, spec())
        cell.must_plan(worker_id)
        cell.kill(worker_id)
    cell.join("c", spec())
    assert cell.must_plan("c").admitted == (first,)
    cell.cancel(others[0])
    assert cell.must_plan("w1").admitted == (second,)
    cell.finish()


def test_a_token_clears_the_record() -> None:
    cell = Cell()
    sequence_id = cell.submit(3, 20)
    for index in range(6):
        cell.join(f"w{index}", spec())
        cell.must_plan(f"w{index}")
        cell.step(f"w{index}")
        cell.kill(f"w{index}")
    cell.join("last", spec())
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def prefilled(cell: Cell, worker_id: str, steps: int) -> None:
    """A worker joins, computes so many chunks of four tokens, and dies."""
    cell.join(worker_id, spec(slots=1, step_tokens=4))
    for _ in range(steps):
        cell.must_plan(worker_id)
        cell.step(worker_id)
    cell.must_plan(worker_id)
    cell.kill(worker_id)


def test_a_chunk_further_than_ever_clears_the_record() -> None:
    cell = Cell(lease=1, in_flight=1)
    sequence_id = cell.submit(40, 5)
    for index in range(6):
        prefilled(cell, f"w{index}", steps=1 + index)
    cell.join("last", spec())
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_a_chunk_computed_before_clears_nothing() -> None:
    """Or a prompt that kills its workers half-way would kill them for ever."""
    cell = Cell(lease=1, in_flight=1)
    sequence_id = cell.submit(40, 5)
    for index in range(3):
        assert sequence_id not in cell.endings
        prefilled(cell, f"w{index}", steps=3)
    error = "3 workers were lost computing this request, the last: killed"
    assert cell.endings[sequence_id].error == error


def test_a_connection_that_breaks_again_and_again_is_nobodys_fault() -> None:
    cell = Cell()
    sequence_id = cell.submit(3, 5)
    for _ in range(10):
        cell.join("w1", spec())
        assert cell.must_plan("w1").admitted == (sequence_id,)
        cell.kill("w1", is_crash=None)
    cell.join("w1", spec())
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def broken(cell: Cell, *worker_ids: str) -> None:
    """Under whatever is seated there their connections break; more is not known yet."""
    for worker_id in worker_ids:
        cell.join(worker_id, spec())
        cell.must_plan(worker_id)
        cell.kill(worker_id, is_crash=None)


def test_after_too_many_broken_connections_the_verdicts_are_awaited() -> None:
    """Poison must not go through all workers before the first is known to be dead."""
    cell = Cell()
    sequence_id = cell.submit(3, 5)
    broken(cell, "a", "b", "c")
    cell.join("d", spec())
    assert cell.plan("d") is None
    cell.verdict("b", is_crash=True)
    cell.verdict("c", is_crash=True)
    assert cell.plan("d") is None
    cell.verdict("a", is_crash=True)
    assert cell.endings[sequence_id].error == (
        "3 workers were lost computing this request, the last: killed"
    )


def test_a_worker_that_lives_is_no_death() -> None:
    cell = Cell()
    sequence_id = cell.submit(3, 5)
    broken(cell, "a", "b", "c")
    cell.verdict("a", is_crash=True)
    cell.verdict("b", is_crash=False)
    cell.join("c", spec())
    assert cell.must_plan("c").admitted == (sequence_id,)
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_a_verdict_after_progress_elsewhere_counts_no_more() -> None:
    cell = Cell()
    sequence_id = cell.submit(3, 20)
    for index in range(6):
        broken(cell, f"w{index}")
        cell.join("other", spec())
        cell.must_plan("other")
        cell.step("other")
        cell.verdict(f"w{index}", is_crash=True)
        cell.kill("other", is_crash=False)
    cell.join("last", spec())
    cell.finish()
    assert cell.reason(sequence_id) is Reason.LENGTH


def test_tokens_spared_by_a_prefix_hit_are_no_progress_to_be_beaten() -> None:
    """Its first worker had most of the prompt cached, and died of it before it answered anything.
    The second gets less far than that: further than ever all the same.
    """
    cell = Cell(spec(block_size=4))
    cell.submit(tuple(range(1, 41)), 1)
    cell.finish()
    cell.submit(tuple(range(1, 50)), 5)
    assert cell.must_plan().joins[0].num_computed_tokens == 40
    cell.kill("w1")
    cell.join("w2", spec(block_size=4, slots=2, step_tokens=20))
    (poison,) = cell.scheduler.waiting
    assert poison.deaths == 1
    assert cell.must_plan("w2").chunk_tokens == 20
    cell.step("w2")
    assert poison.deaths == 0
