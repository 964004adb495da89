from pathlib import Path

from benchmarks.worker.speculation import Case, measure, silent
from gpu_worker.service.loading import load
from gpu_worker.settings import WorkerSettings
from tests.support.random_model import write_random_model


def test_what_is_guessed_in_a_circle_is_right(tmp_path: Path) -> None:
    folder = silent(
        write_random_model(tmp_path / "model", intermediate_size=64, max_position_embeddings=2048)
    )
    settings = WorkerSettings(
        model=str(folder), device="cpu", dtype="fp32", slots=2, step_tokens=512, kv_blocks=512
    )
    found = measure(load(settings), Case(text="circle", rows=2, guesses=3, tokens=41), rounds=1)
    # Of all steps but the first, which computes the prompts.
    assert (found["steps_alone"], found["steps"], found["guessed"]) == (40, 10, 60)
