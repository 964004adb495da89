"""Records stay for a while after they are folded, within a bound of bytes."""

from scheduler_svc.journal_window import JournalWindow

SECOND = 1_000_000_000


def window(*, bytes_max: int = 1 << 20) -> JournalWindow:
    return JournalWindow(keep_ns=30 * SECOND, bytes_max=bytes_max, first_seq=100, now_ns=0)


def test_what_is_folded_stays_for_its_time() -> None:
    """A fold a second, of ten records, each of those before the fold before."""
    kept = window()
    trimmed = []
    for second in range(1, 41):
        for seq in range(91 + 10 * second, 101 + 10 * second):
            kept.put(seq, 100)
        trimmed.append(kept.trim_seq(90 + 10 * second, second * SECOND))
    # Everything of an earlier leader is as old as this one's beginning.
    assert trimmed[:29] == [0] * 29
    assert trimmed[29:32] == [100, 110, 120]
    assert trimmed[-1] == 200


def test_a_crowd_of_bytes_goes_sooner_and_never_before_it_is_folded() -> None:
    kept = window(bytes_max=2500)
    for second in range(1, 6):
        for seq in range(91 + 10 * second, 101 + 10 * second):
            kept.put(seq, 100)
        trim_seq = kept.trim_seq(90 + 10 * second, second)
        assert trim_seq == (0 if second < 3 else 80 + 10 * second)
        assert trim_seq <= 90 + 10 * second
    assert kept.trim_seq(110, 6) == 130, "never back"
