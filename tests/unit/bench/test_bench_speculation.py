from pathlib import Path

from benchmarks.worker.speculation import Case, around, circle_of, measure, silent
from gpu_worker.service.loading import load
from gpu_worker.settings import WorkerSettings
from tests.support.random_model import write_random_model


def test_every_draft_of_a_circle_is_accepted(tmp_path: Path) -> None:
    folder = silent(
        write_random_model(tmp_path / "model", intermediate_size=64, max_position_embeddings=2048)
    )
    settings = WorkerSettings(
        model=str(folder), device="cpu", dtype="fp32", slots=2, step_tokens=512, kv_blocks=512
    )
    loaded, case = load(settings), Case(text="circle", rows=2, drafts=3, tokens=41)
    found = measure(loaded, case, around(circle_of(loaded), case.rows), rounds=1)
    # Of all steps but the first, which computes the prompts.
    assert (found["steps_alone"], found["steps"], found["drafted"]) == (40, 10, 60)
