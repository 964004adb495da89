"""The floor, the ladder's law and tally, the guard: against cases that can be done by hand."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import guard
from benchmarks.ladder import ladder, ladder_page, page
from benchmarks.ladder.tally import Tally
from benchmarks.peers.checkpoint import SHAPES, VOCAB_SIZE
from benchmarks.peers.floor import Machine, Shape, ideal, shape_of
from kaiten.bench.options import BenchOptions
from kaiten.bench.plan import make_plan
from kaiten.bench.workload import Job
from kaiten.v1.ledger_pb2 import CoreInput, JournalRecord, PlanInput, SequenceFinished

SHAPE = Shape(layers=1, hidden_size=2, kv_size=1, body_parameters=100, head_parameters=50)
lengths = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def job(prompt: int, output: int) -> Job:
    return Job(index=0, prompt=(7,) * prompt, output_tokens=output)


def test_one_sequence_reads_all_weights_for_every_token() -> None:
    machine = Machine(read_bytes_per_s=1000.0, flops_per_s=1e12)
    found = ideal([job(1, 3)], SHAPE, machine, "bf16", slots=4, step_tokens=8)
    assert found.steps == 3
    # 150 parameters of 2 bytes each step, and 4 bytes of KV for each of 1 + 2 + 3 tokens.
    assert found.wall_s == pytest.approx((3 * 300 + 4 * 6) / 1000)
    assert found.output_tokens_per_s == pytest.approx(3 / found.wall_s)


def test_a_prompt_is_chunked_and_a_slow_machine_computes() -> None:
    machine = Machine(read_bytes_per_s=1e12, flops_per_s=1000.0)
    found = ideal([job(10, 1)], SHAPE, machine, "fp32", slots=4, step_tokens=4)
    assert found.steps == 3
    # A token attends to itself and those before it, however the prompt is cut.
    attended = sum(range(1, 11))
    flops = 2 * 100 * 10 + 2 * 50 + 4 * 2 * attended
    assert found.wall_s == pytest.approx(flops / 1000, rel=1e-6)


def test_the_published_crowd_has_the_published_floor(tmp_path: Path) -> None:
    config = {"vocab_size": VOCAB_SIZE, **SHAPES["125m"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = shape_of(tmp_path)
    assert shape.body_parameters + shape.head_parameters == pytest.approx(128.5e6, rel=0.01)
    machine = Machine(read_bytes_per_s=47e9, flops_per_s=955e9)
    jobs = make_plan(BenchOptions()).jobs
    found = ideal(jobs, shape, machine, "bf16", slots=64, step_tokens=512)
    assert found.output_tokens_per_s == pytest.approx(1356, rel=0.1)


@given(lengths, st.integers(1, 9))
def test_the_law_is_at_least_one_and_one_without_raggedness(made: list[int], seats: int) -> None:
    assert ladder.law(made, seats) >= 1 - 1e-9
    whole = [7] * (seats * 3)
    assert ladder.law(whole, seats) == pytest.approx(1)


@given(lengths, st.integers(1, 9), st.integers(0, 9))
def test_the_law_to_the_end_is_at_most_the_law(made: list[int], seats: int, seed: int) -> None:
    shuffled = random.Random(seed).sample(made, len(made))
    gain = ladder.law_to_the_end(made, shuffled, seats)
    # Seats are filled no better than fully, and no worse than one at a time.
    assert gain <= ladder.law(made, seats) + 1e-9
    assert gain >= ladder.law(made, seats) / seats - 1e-9


def plan(*sequence_ids: int, blocks_free: int) -> CoreInput:
    slots = range(len(sequence_ids))
    return CoreInput(
        plan=PlanInput(admitted=sequence_ids, join_slots=slots, blocks_free=blocks_free)
    )


def step(
    seq: int, sequence_ids: list[int], position: int, *told: CoreInput, ends: int = 0
) -> JournalRecord:
    finished = [SequenceFinished(sequence_id=ends, output_tokens=position + 1)] if ends else []
    return JournalRecord(
        seq=seq,
        sequence_ids=sequence_ids,
        positions=[position] * len(sequence_ids),
        token_ids=[7] * len(sequence_ids),
        finished=finished,
        inputs=told,
    )


def test_a_tally_by_hand() -> None:
    """Two of four seats, three blocks of four tokens of ten; 1 ends at once, 2 goes on alone."""
    tally = Tally(slots=4, block_tokens=4, block_count=10, prompt_tokens=3, reserve_tokens=20)
    tally.add([step(1, [1, 2], 0, plan(1, 2, blocks_free=7), ends=1)])
    tally.add([step(2, [2], 1, ends=2)])
    found = tally.result()
    assert found.steps == 2
    assert found.occupancy == 3 / 8
    held = (4 + 4) + 5
    assert found.kv_waste_paged == pytest.approx(1 - held / (12 + 12))
    assert found.kv_waste_reserved == pytest.approx(1 - held / 60)
    assert found.lengths == (1, 2)


def test_kv_waste_of_static_batches_by_hand() -> None:
    """Two rows reserve 400 places each for three steps; a row that is done holds nothing of use."""
    assert (ladder.PROMPT_TOKENS, ladder.REQUEST_TOKENS_MAX) == (16, 400)
    used = 17 + (17 + 18 + 19)
    assert ladder.static_kv_waste([1, 3], 2) == pytest.approx(1 - used / (3 * 2 * 400))
    assert ladder.static_kv_waste([1, 3], 1) == pytest.approx(1 - used / (4 * 400))


def cell(crowd: str, rung: str, speed: float) -> ladder_page.Cell:
    return ladder_page.Cell(
        crowd=crowd,
        rung=rung,
        seats=5,
        tokens_per_s=speed,
        latency_mean_s=1,
        latency_p99_s=2,
        occupancy=0.75,
        padding_waste=0.2,
        kv_waste=0.1,
        steps=9,
        preemptions=0,
    )


@pytest.mark.parametrize("name", ["ladder", "headline"])
def test_the_page_has_its_markers_and_takes_a_table(tmp_path: Path, name: str) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(page.PAGE.read_text())
    page.write_table(name, "| first |", copy)
    page.write_table(name, "| second |", copy)
    assert copy.read_text().count("| second |") == 1
    assert "| first |" not in copy.read_text()


def test_the_ladder_as_a_table_and_a_picture(tmp_path: Path) -> None:
    cells = [cell("code", rung.name, 100.0 * (i + 1)) for i, rung in enumerate(ladder.RUNGS)]
    gains = [
        ladder_page.Gain(
            crowd="code",
            seats=seats,
            law=3,
            law_to_the_end=2,
            in_steps=1.9,
            in_throughput=1.5,
            latency_mean=0.5,
            latency_p99=0.4,
        )
        for seats in (5, 16)
    ]
    text = ladder_page.table(cells, gains, 0.031)
    assert text.count("| continuous, paged | 5 | 400 | 4.00 |") == 1
    assert "3.1%" in text
    ladder_page.draw(cells, gains, tmp_path / "ladder.svg")
    assert "<svg" in (tmp_path / "ladder.svg").read_text()


def test_the_guard_fails_on_a_large_drop_only(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = iter([3.0, 2.5, 1.5])
    monkeypatch.setattr(guard, "ratio_of", lambda _: next(measured))
    assert guard.guarded(lambda: 0.0, 1.0) == 1.5, "a bad ratio is measured again"
    assert guard.is_bad(2.01, 1.0)
    assert not guard.is_bad(1.99, 1.0)
    assert not guard.is_bad(99.0, None)


def test_every_probe_has_a_kept_ratio() -> None:
    assert guard.read_kept().keys() == guard.PROBES.keys()
