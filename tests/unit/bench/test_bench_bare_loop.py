"""The bare loop serves every job to its exact length, never more at once than ask."""

import torch

from benchmarks.serving.bare_loop import Asked, BareLoop
from tests.support.markov_device import limits, table_device

VOCAB = 16


def test_every_job_gets_its_tokens() -> None:
    # After token t comes t + 1.
    table = torch.eye(VOCAB).roll(1, dims=1)
    loop = BareLoop(table_device(table), limits(vocab_size=VOCAB, slots=4))
    lengths = [1, 9, 3, 5, 2, 7]
    jobs = [Asked(prompt=(1,) * (4 + n), output_tokens=n) for n in lengths]
    stories = loop.run(jobs, concurrency=2)
    assert [len(story.arrivals_s) for story in stories] == lengths
    # The third is asked when the first is answered, and the clock never goes back.
    assert [story.due_s for story in stories[:2]] == [0.0, 0.0]
    assert stories[2].due_s >= stories[0].arrivals_s[-1] > 0
    for story in stories:
        assert story.due_s <= story.arrivals_s[0]
        assert story.arrivals_s == sorted(story.arrivals_s)
    # Two rows at most in each step: nothing short of the longest lane is possible.
    assert loop.steps.count >= sum(lengths) / 2
    assert loop.run(jobs[:1], concurrency=64)[0].arrivals_s


def test_it_counts_steps_of_its_last_run_only() -> None:
    loop = BareLoop(table_device(torch.eye(VOCAB)), limits(vocab_size=VOCAB, slots=4))
    for _ in range(2):
        loop.run([Asked(prompt=(3,), output_tokens=4)], concurrency=1)
        assert loop.steps.count == 4
