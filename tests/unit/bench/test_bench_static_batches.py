"""Static batches played by the client: who is computed with whom, how long, who hears what."""

import asyncio

import pytest

from benchmarks.ladder.static_batches import StaticBatches
from kaiten.bench.outcomes import AskError, Ending, OnTokens
from kaiten.bench.runner import Load
from kaiten.bench.workload import Job


class Steps:
    """A server whose sequences all advance one token at a time; knows what it was asked for."""

    says = "steps"
    vocab_size = context_tokens = None

    def __init__(self, *, fails: int = -1, stops_at: int = 1000) -> None:
        self.asked: list[tuple[int, int]] = []
        self.running = self.running_max = 0
        self.fails, self.stops_at = fails, stops_at
        self.is_closed = False

    async def prepare(self) -> None: ...

    async def close(self) -> None:
        assert not self.running
        self.is_closed = True

    async def ask(self, job: Job, on_tokens: OnTokens, timeout_s: float) -> Ending:
        self.asked.append((job.index, job.output_tokens))
        if job.index == self.fails:
            raise AskError("overloaded", "no")
        self.running += 1
        self.running_max = max(self.running_max, self.running)
        made = min(job.output_tokens, self.stops_at)
        for _ in range(made):
            await asyncio.sleep(0)
            on_tokens(1)
        self.running -= 1
        return Ending(prompt_tokens=len(job.prompt), output_tokens=made)


LENGTHS = (3, 9, 1, 4, 4, 2, 7)


def jobs() -> list[Job]:
    return [Job(index=i, prompt=(1, 2), output_tokens=n) for i, n in enumerate(LENGTHS)]


async def served(steps: Steps) -> "list[tuple[int, str]]":
    batches = StaticBatches(steps, 3)
    outcomes = await Load(batches, timeout_s=9).open_loop(jobs(), [0.0] * len(LENGTHS))
    await batches.close()
    return [(outcome.output_tokens, outcome.error) for outcome in outcomes]


async def test_every_row_computes_what_the_longest_of_its_batch_needs() -> None:
    steps = Steps()
    answers = await served(steps)
    assert answers == [(length, "") for length in LENGTHS], "nobody hears the padding"
    assert steps.asked == [(0, 9), (1, 9), (2, 9), (3, 4), (4, 4), (5, 4), (6, 7)]
    assert steps.running_max == 3
    assert steps.is_closed


async def test_a_newcomer_waits_for_the_whole_batch() -> None:
    steps = Steps()
    batches = StaticBatches(steps, 3)
    short, long, late = (
        Job(index=i, prompt=(1,), output_tokens=n) for i, n in enumerate((2, 30, 1))
    )
    first = [asyncio.create_task(batches.ask(job, lambda _: None, 9.0)) for job in (short, long)]
    await first[0]
    assert not first[1].done(), "a short answer does not wait for the long one"
    await batches.ask(late, lambda _: None, 9.0)
    assert first[1].done()
    assert steps.asked == [(0, 30), (1, 30), (2, 1)]
    await batches.close()


async def test_a_failed_row_fails_alone() -> None:
    answers = await served(Steps(fails=1))
    assert answers[1] == (0, "overloaded")
    assert [error for _, error in answers].count("") == len(LENGTHS) - 1


async def test_an_answer_that_stops_early_is_seen_as_short() -> None:
    answers = await served(Steps(stops_at=2))
    assert [tokens for tokens, _ in answers] == [min(length, 2) for length in LENGTHS]


async def test_what_is_said_names_the_batching() -> None:
    assert StaticBatches(Steps(), 8).says == "steps, in static batches of 8"
    with pytest.raises(AskError):
        await StaticBatches(Steps(fails=0), 8).ask(jobs()[0], lambda _: None, 1.0)
