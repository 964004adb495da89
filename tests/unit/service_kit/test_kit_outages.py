"""What is away is told when it begins, ever more seldom, and when it is over."""

from structlog.testing import capture_logs

from service_kit.outages import Outage

S = 1_000_000_000


def test_an_hour_of_five_tries_a_second_is_told_at_intervals_that_double_to_a_minute() -> None:
    outage = Outage("store.waiting", over="store.answers")
    with capture_logs() as lines:
        for tenth_s in range(0, 36_000, 2):
            outage.failed(7 * S + tenth_s * S // 10, reason="away")
        outage.ended(3607 * S)
    *told, over = lines
    assert [line["lasts_s"] for line in told[:8]] == [0, 1, 3, 7, 15, 31, 63, 123]
    assert len(told) == 8 + (3600 - 123 - 1) // 60
    assert told[1] == {
        "event": "store.waiting",
        "log_level": "warning",
        "reason": "away",
        "lasts_s": 1.0,
        "tries": 6,
    }
    assert over == {
        "event": "store.answers",
        "log_level": "info",
        "lasted_s": 3600.0,
        "tries": 18_000,
    }


def test_what_is_not_away_is_not_told() -> None:
    outage = Outage("store.waiting", over="store.answers")
    with capture_logs() as lines:
        outage.ended(S)
        outage.failed(2 * S)
        outage.ended(3 * S)
        outage.ended(4 * S)
    assert [line["event"] for line in lines] == ["store.waiting", "store.answers"]


def test_the_next_one_begins_anew() -> None:
    """However long the last one was, and however soon it comes."""
    outage = Outage("store.waiting", over="store.answers")
    for second in range(100):
        outage.failed(second * S)
    outage.ended(100 * S)
    with capture_logs() as lines:
        for second in (100, 101, 102, 103):
            outage.failed(second * S)
    assert [line["lasts_s"] for line in lines] == [0, 1, 3]


def test_tries_that_are_far_apart_are_each_told() -> None:
    outage = Outage("store.waiting", over="store.answers")
    with capture_logs() as lines:
        for minute in range(5):
            outage.failed(minute * 60 * S)
    assert [line["tries"] for line in lines] == [1, 2, 3, 4, 5]
