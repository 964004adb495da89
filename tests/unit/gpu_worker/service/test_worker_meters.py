"""What a worker says of how busy it is."""

import pytest

from gpu_worker.service.metrics import BUSY_S, BusyShare

S = 1_000_000_000


def test_a_busy_worker_is_busy_and_an_idle_one_is_not() -> None:
    share = BusyShare()
    for tenth in range(300):
        share.add(100_000, tenth * S // 10)
    assert share.share(30 * S) == pytest.approx(1)
    assert share.share(35 * S) == pytest.approx(0.5)
    for idle_s in (BUSY_S, BUSY_S + 1, 60, 3600):
        assert share.share((30 + idle_s) * S) == 0


def test_steps_after_an_hour_of_nothing_are_a_share_of_the_last_seconds() -> None:
    share = BusyShare()
    share.add(2_000_000, 3600 * S)
    assert share.share(3603 * S) == pytest.approx(2 / BUSY_S)
    assert share.share(3609 * S) == pytest.approx(2 / BUSY_S)
