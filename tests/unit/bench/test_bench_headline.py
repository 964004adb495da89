"""The headline's figures, against cases that can be done by hand."""

from pathlib import Path

from benchmarks.ladder import headline
from benchmarks.ladder.ladder import law
from kaiten.bench.outcomes import Frame, Outcome


def outcome(due_s: float, *frames: tuple[float, int]) -> Outcome:
    tokens = sum(count for _, count in frames)
    return Outcome(
        index=0,
        due_s=due_s,
        sent_s=due_s,
        done_s=frames[-1][0],
        frames=tuple(Frame(at_s=at_s, tokens=count) for at_s, count in frames),
        prompt_tokens=1,
        output_tokens=tokens,
        output_tokens_asked=tokens,
    )


STORIES = (outcome(0.0, (1.0, 4), (2.0, 4), (9.0, 4)), outcome(1.0, (4.0, 2), (5.0, 2)))


def test_throughput_counts_what_came_until_the_last_one_was_seated() -> None:
    way = headline.way_of([STORIES])
    assert way.tokens_per_s == 10 / 4
    assert way.latency_mean_s == (9 + 4) / 2
    assert way.ttft_mean_s == (1 + 3) / 2


def test_the_lengths_allow_more_than_the_goal() -> None:
    lengths = [job.output_tokens for job in headline.jobs_of(800)]
    most = headline.LOAD_SHARE * law(lengths, headline.SEATS)
    assert most > headline.GOALS["tokens_per_s"]
    assert max(lengths) <= headline.OUTPUT_TOKENS_MAX


def test_the_headline_as_a_table_and_a_picture(tmp_path: Path) -> None:
    slow = headline.Way(tokens_per_s=100, latency_mean_s=10, latency_p99_s=20, ttft_mean_s=8)
    fast = headline.Way(tokens_per_s=310, latency_mean_s=1, latency_p99_s=4, ttft_mean_s=0.5)
    text = headline.table({"static": slow, "continuous": fast}, 3.9, 12.0)
    assert "| throughput | 100 tok/s | 310 tok/s | 3.10 × | ≥ 3 × |" in text
    assert "| latency p99 | 20.00 s | 4.00 s | 0.20 × | ≤ 0.31 × |" in text
    headline.draw({"static": STORIES, "continuous": STORIES}, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text()
