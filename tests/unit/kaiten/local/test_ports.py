"""A chosen port stays ours: nobody is given it before its listener came, or between two of them."""

import socket
from pathlib import Path

import pytest

from kaiten.local.model_source import ModelSource
from kaiten.local.ports import HeldPort
from kaiten.local.stack import ServeOptions, planned_stack


def listener(port: int) -> socket.socket:
    """As every server of ours listens."""
    return socket.create_server(("127.0.0.1", port))


def can_be_taken(port: int) -> bool:
    """By a program that knows nothing of us."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def test_a_held_port_takes_one_listener_at_a_time_and_nobody_else() -> None:
    with HeldPort() as port:
        assert not can_be_taken(port.number)
        for _ in range(2):
            with listener(port.number):
                socket.create_connection(("127.0.0.1", port.number)).close()
                with pytest.raises(OSError, match="in use"):
                    listener(port.number)
            assert not can_be_taken(port.number)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port.number))


def test_a_closed_one_is_free() -> None:
    port = HeldPort()
    port.close()
    port.close()
    assert can_be_taken(port.number)


def test_what_listens_cannot_be_held() -> None:
    with (
        listener(0) as taken,
        pytest.raises(OSError, match="in use"),
    ):
        HeldPort("127.0.0.1", taken.getsockname()[1])


def test_all_ports_of_a_plan_are_held(tmp_path: Path) -> None:
    """Seen: a scheduler could not bind because somebody was given its port before it started."""
    options = ServeOptions(
        model=ModelSource(folder=tmp_path, name="m"),
        data_dir=tmp_path,
        grpc_port=0,
        http_port=0,
        workers=2,
        redis_url="redis://127.0.0.1:1",
    )
    with planned_stack(options) as stack:
        inner = [*stack.scheduler_addresses, *stack.worker_addresses]
        assert len({address for address in inner if address.startswith("unix:/")}) == 4
        addresses = [stack.grpc_address, stack.http_url]
        numbers = [int(address.rpartition(":")[2]) for address in addresses]
        assert len(set(numbers)) == 2
        assert not any(map(can_be_taken, numbers))
    assert all(map(can_be_taken, numbers))
