"""How long to wait before the next try."""

# No wait that starts at a millisecond is still below its limit after so many doublings.
DOUBLINGS_MAX = 64


def doubled_s(first_s: float, failures: int, max_s: float) -> float:
    """Seconds after the n-th failure in a row: each time twice as long, `max_s` at most."""
    return min(max_s, first_s * 2.0 ** min(failures - 1, DOUBLINGS_MAX))
