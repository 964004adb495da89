"""What the services cost, from turns to medians; and the bare loop's account of a job."""

import os

import pytest

from benchmarks.serving.service_cost import Steps, Turn, _checked, _side, _told
from benchmarks.serving.stack import cpu_s, rss_mb
from kaiten.bench.figures import figures_of
from kaiten.bench.outcomes import Outcome
from kaiten.bench.workload import Job


def story(index: int, arrivals_s: list[float]) -> Outcome:
    job = Job(index=index, prompt=(5,) * 3, output_tokens=2)
    return _told(job, {"due_s": 0.5, "arrivals_s": arrivals_s})


def turn(done_s: float, worker_s: float) -> Turn:
    return Turn(
        figures=figures_of([story(0, [1.0, done_s])]),
        cpu_s={"gateway": 0.002, "gpu_worker": worker_s},
        rss_mb={"gateway": 80.0},
        steps=Steps(count=2, computing_s=done_s / 2),
    )


def test_a_story_becomes_an_outcome() -> None:
    outcome = story(3, [1.0, 2.5])
    assert (outcome.index, outcome.prompt_tokens, outcome.output_tokens) == (3, 3, 2)
    assert (outcome.ttft_s, outcome.latency_s) == (0.5, 2.0)


def test_a_side_is_its_medians_with_the_costliest_process_first() -> None:
    side = _side([turn(2.5, 4.0), turn(4.5, 6.0), turn(1.5, 5.0)])
    assert (side["tokens_per_s"], side["wall_s"]) == (1.0, 2.0)
    assert side["all_tokens_per_s"] == [1.0, 0.5, 2.0]
    assert side["cpu_ms_per_token"] == {"gpu_worker": 2500.0, "gateway": 1.0}
    assert side["steps"] == {"count": 2, "computing_s": 1.25}


def test_a_wrong_length_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="1 wrong lengths"):
        _checked(figures_of([story(0, [1.0])]))


def test_a_stack_is_counted_by_what_its_processes_run() -> None:
    held, used = rss_mb(os.getpid()), cpu_s(os.getpid())
    assert all(each > 0 for each in held.values())
    assert used["client"] > 0
    assert held.keys() == used.keys() - {"client"}
