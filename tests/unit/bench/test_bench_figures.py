"""Figures of runs whose figures are known, and what must hold of any run."""

import json
import random
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kaiten.bench import charts
from kaiten.bench.figures import (
    Target,
    figures_of,
    frame_gaps_s,
    spread,
    token_gaps_s,
)
from kaiten.bench.outcomes import Frame, Outcome
from kaiten.bench.report import Run, figure, page, typical

# No clock tells less than a nanosecond.
times = st.floats(0, 100, allow_nan=False).map(lambda time_s: round(time_s, 9))


def outcome(index: int = 0, *, error: str = "", **changes: float) -> Outcome:
    """Due at 1, sent at 1.5, tokens at 2 (one), 3 (four) and 5 (one), done at 6."""
    frames = (Frame(at_s=2, tokens=1), Frame(at_s=3, tokens=4), Frame(at_s=5, tokens=1))
    made = Outcome(
        index=index,
        due_s=1,
        sent_s=1.5,
        done_s=6,
        frames=() if error else frames,
        prompt_tokens=10,
        output_tokens=0 if error else 6,
        output_tokens_asked=6,
        error=error,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    due_s = draw(times)
    sent_s = due_s + draw(times)
    at, frames = sent_s, []
    for gap_s, tokens in draw(st.lists(st.tuples(times, st.integers(1, 9)), max_size=6)):
        at += gap_s
        frames.append(Frame(at_s=at, tokens=tokens))
    total = sum(frame.tokens for frame in frames)
    return Outcome(
        index=draw(st.integers(0, 99)),
        due_s=due_s,
        sent_s=sent_s,
        done_s=at + draw(times),
        frames=tuple(frames),
        prompt_tokens=draw(st.integers(1, 50)),
        output_tokens=total,
        output_tokens_asked=draw(st.sampled_from([total, total + 1])),
        error=draw(st.sampled_from(["", "", "timeout"])),
    )


def test_a_spread_of_known_numbers() -> None:
    found = spread(float(number) for number in range(100, -1, -1))
    assert (found.count, found.mean, found.max) == (101, 50.0, 100.0)
    assert (found.p50, found.p90, found.p99) == (50.0, 90.0, 99.0)


def test_nothing_has_a_spread_of_zeros() -> None:
    assert spread([]) == spread(iter(()))
    assert spread([]).count == 0
    assert figures_of([]).output_tokens_per_s == 0


def test_one_request_by_hand() -> None:
    found = figures_of([outcome()])
    assert found.wall_s == 5
    assert found.output_tokens_per_s == pytest.approx(6 / 5)
    assert found.ttft_s.p50 == 1, "from the due time, not from when it was sent"
    assert found.latency_s.mean == 5
    assert found.send_late_s.max == 0.5
    assert frame_gaps_s(outcome()) == [1, 2]
    assert token_gaps_s(outcome()) == [0.25] * 4 + [2]
    assert outcome().tpot_s == pytest.approx(3 / 5)


def test_failures_count_as_errors_and_not_as_throughput() -> None:
    found = figures_of([outcome(), outcome(1, error="timeout"), outcome(2, error="timeout")])
    assert found.errors == {"timeout": 2}
    assert (found.requests, found.requests_ok, found.output_tokens) == (3, 1, 6)
    assert found.latency_s.count == 1


def test_another_length_than_asked_is_told() -> None:
    assert figures_of([outcome(), outcome(1, output_tokens=5)]).wrong_length == 1


@pytest.mark.parametrize(
    ("target", "good"),
    [
        (Target(), 1),
        (Target(ttft_s=1), 1),
        (Target(ttft_s=0.9), 0),
        (Target(tpot_s=0.6), 1),
        (Target(tpot_s=0.5), 0),
        (Target(latency_s=4.9, ttft_s=2), 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(target: Target, good: int) -> None:
    found = figures_of([outcome(), outcome(1, error="overloaded")], target)
    assert found.goodput_share == good / 2
    assert found.goodput_requests_per_s == pytest.approx(good / 5)


@given(st.lists(outcomes(), max_size=12), st.integers(0, 9))
def test_order_does_not_matter_and_percentiles_ascend(made: list[Outcome], seed: int) -> None:
    found = figures_of(made)
    shuffled = random.Random(seed).sample(made, len(made))
    assert figures_of(shuffled) == found
    for each in (found.ttft_s, found.latency_s, found.inter_frame_s, found.inter_token_s):
        assert 0 <= each.p50 <= each.p90 <= each.p99 <= each.max
    assert found.requests == found.requests_ok + sum(found.errors.values())
    json.loads(json.dumps(found.to_json()))


@given(st.lists(outcomes(), max_size=12))
def test_pictures_keep_what_they_show(made: list[Outcome]) -> None:
    flight = charts.in_flight(made)
    assert flight[-1][1] == 0
    assert all(height >= 0 for _, height in flight)
    rate = charts.token_rate(made)
    if rate:
        width_s = max(each.done_s for each in made) / charts.WINDOWS
        shown = sum(height * width_s for _, height in rate)
        assert shown == pytest.approx(sum(f.tokens for each in made for f in each.frames))
    shares = [share for _, share in charts.distribution(each.latency_s for each in made)]
    assert shares == sorted(shares)


@given(st.floats(1e-6, 1e9))
def test_ticks_are_few_round_and_within(top: float) -> None:
    found = charts.ticks(top)
    assert found[0] == 0
    assert 2 <= len(found) <= 7
    assert found[-1] <= top * 1.001


class Tags(HTMLParser):
    """Every start has its end, and nothing is loaded from anywhere."""

    VOID = frozenset({"meta", "line", "path", "rect", "br", "i"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def run(name: str, *made: Outcome) -> Run:
    return Run(name=name, says="a <server>", outcomes=made, figures=figures_of(made))


@pytest.mark.parametrize(
    "runs",
    [
        [run("A", outcome(), outcome(1, done_s=9))],
        [run("A", outcome()), run("<b>", outcome(done_s=8)), run("A", outcome(done_s=7))],
        [run("A", outcome(error="timeout"))],
    ],
)
def test_the_page_is_whole_and_stands_by_itself(runs: list[Run]) -> None:
    text = page(runs, title="a & b", facts={"workload": "<x>"})
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert text.count('role="img"') == 5 + len({each.name for each in runs})
    assert "<x>" not in text
    assert "a &amp; b" in text
    assert "nan" not in text.lower().replace("finance", "")
    assert ("timeout" in text) == any(each.figures.errors for each in runs)


def test_a_crowd_of_targets_can_be_told_apart() -> None:
    count = len(charts.COLOURS) * len(charts.DASHES)
    looks = [charts.look_of(index) for index in range(count)]
    assert len(set(looks)) == count >= 10
    assert not any(look.dash for look in looks[:8]), "colours first"
    assert charts.look_of(count) == looks[0]
    names = [f"target-{index}" for index in range(11)]
    text = page([run(name, outcome()) for name in names], title="t", facts={})
    table, key = text.split('class="key"')[0], text.split('class="key"')[1].split("</p>")[0]
    for name, look in zip(names, looks, strict=False):
        said = f"{look.stroke}/></svg>{name}<"
        assert table.count(said) == key.count(said) == 1


def test_the_typical_round_is_the_one_in_the_middle() -> None:
    rounds = [run("A", outcome(done_s=end)) for end in (6.0, 20.0, 8.0)]
    assert typical(rounds).figures.wall_s == 7
    assert [figure(value) for value in (0.01234, 1.5, 123.4, 12345.6)] == [
        "0.0123",
        "1.5",
        "123",
        "12,346",
    ]
