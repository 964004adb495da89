"""What explaining a prompt costs in memory does not grow with the prompt."""

from pathlib import Path

import psutil

from gpu_worker.service.loading import load
from gpu_worker.settings import WorkerSettings
from tests.support.markov_device import drive
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model

VOCAB = 151_936
# Their logits at once: 690 MB.
PROMPT = [(index * 7919) % VOCAB for index in range(1200)]


def rss_mb() -> int:
    return int(psutil.Process().memory_info().rss >> 20)


def test_the_logits_of_a_prompt_are_never_all_there(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path / "wide", vocab_size=VOCAB, max_position_embeddings=2048)
    settings = WorkerSettings(
        model=str(folder), dtype="fp32", slots=2, step_tokens=2048, kv_blocks=128, threads=1
    )
    loaded = load(settings)
    grown_mb = []
    for count in (60, 1200):
        before_mb = rss_mb()
        scheduler = MiniScheduler(loaded.limits)
        scheduler.submit(PROMPT[:count], sampling(max_tokens=1, prompt_logprobs=20))
        drive(loaded.runner, scheduler)
        assert sum(len(piece.logprobs) for piece in scheduler.prompts[0]) == count - 1
        grown_mb.append(rss_mb() - before_mb)
    # A part takes 160 MB, the second prompt finds most of the first one's; seen: 30 to 110.
    assert grown_mb[1] < 250, grown_mb
