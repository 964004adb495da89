"""Keys that nobody has: counted, logged without the key, answered late, within bounds."""

import asyncio

import pytest
from structlog.testing import capture_logs

from gateway.tenants import Keyring, Tenant, WrongKey, digest
from gateway.wrong_keys import (
    ADDRESSES_MAX,
    FORGET_S,
    WAIT_S_MAX,
    WAIT_S_MIN,
    WAITING_MAX,
    WrongKeys,
    address_of,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_refusals_of_one_address_grow_slower_to_a_bound_and_others_do_not() -> None:
    clock = Clock()
    wrong = WrongKeys(clock)
    waits = [wrong.note("192.0.2.1") for _ in range(40)]
    assert waits[:3] == [WAIT_S_MIN, 2 * WAIT_S_MIN, 4 * WAIT_S_MIN]
    assert waits[-1] == WAIT_S_MAX
    assert wrong.note("192.0.2.2") == WAIT_S_MIN
    clock.now_s += FORGET_S + 1
    assert wrong.note("192.0.2.1") == WAIT_S_MIN
    assert wrong.count == 42


def test_the_log_has_a_line_a_second_of_an_address_and_no_key() -> None:
    clock = Clock()
    wrong = WrongKeys(clock)
    with capture_logs() as logs:
        for _ in range(5):
            wrong.note("192.0.2.1")
        wrong.note("192.0.2.2")
        clock.now_s += 1.0
        wrong.note("192.0.2.1")
    said = [(entry["address"], entry["count"]) for entry in logs]
    assert said == [("192.0.2.1", 1), ("192.0.2.2", 1), ("192.0.2.1", 5)]
    assert {entry["event"] for entry in logs} == {"keys.wrong"}


def test_what_is_remembered_has_a_bound() -> None:
    wrong = WrongKeys(Clock())
    with capture_logs():
        for number in range(2 * ADDRESSES_MAX):
            wrong.note(f"10.0.{number >> 8}.{number & 255}")
    assert repr(wrong) == f"WrongKeys({2 * ADDRESSES_MAX}, {ADDRESSES_MAX} addresses)"


async def test_so_many_refusals_wait_and_no_more() -> None:
    """Those beyond are told at once: they cost less so."""
    wrong = WrongKeys(Clock())
    with capture_logs():
        for _ in range(40):
            wrong.note("192.0.2.1")
        waiting = [asyncio.create_task(wrong.seen("192.0.2.1")) for _ in range(WAITING_MAX)]
        await asyncio.sleep(0)
        beyond = asyncio.create_task(wrong.seen("192.0.2.1"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert beyond.done()
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert wrong._waiting == 0


async def test_a_right_key_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the same proxy as somebody who tries keys."""
    ring = Keyring([(digest("one"), Tenant(name="a"))])
    seen: list[str] = []

    async def never(peer: str) -> None:
        seen.append(peer)

    monkeypatch.setattr(ring.wrong_keys, "seen", never)
    with pytest.raises(WrongKey):
        await ring.admit("Bearer two", "192.0.2.1")
    assert (await ring.admit("Bearer one", "192.0.2.1")).name == "a"
    assert seen == ["192.0.2.1"]


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("ipv4:192.0.2.1:5000", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:5000", "2001:db8::/64"),
        ("ipv6:[2001:db8::ffff:1]:5000", "2001:db8::/64"),
        ("ipv6:%5B::ffff:192.0.2.1%5D:5000", "192.0.2.1"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix:/run/kaiten/gateway.sock", "unknown"),
        ("", "unknown"),
    ],
)
def test_an_address_is_what_a_peer_is_called(peer: str, address: str) -> None:
    assert address_of(peer) == address
