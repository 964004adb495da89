"""What commands take for a wish for TLS."""

from pathlib import Path

import pytest

from kaiten.tls_options import TlsOptions


def test_a_variable_that_is_empty_is_no_wish() -> None:
    """As a path it is the folder that one stands in."""
    empty = TlsOptions(tls_ca=Path(""), tls_cert=Path(""), tls_key=Path(""))
    assert empty.of("gateway:50051") == ("gateway:50051", None)
    with pytest.raises(ValueError, match=r"ca /none\.pem cannot be read"):
        TlsOptions(tls_ca=Path("/none.pem")).of("gateway:50051")


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:99999", "a port must be from 1 to 65535, got 99999"),
        ("[fd00::1]:65536", "a port must be from 1 to 65535, got 65536"),
        ("https://gateway:0/", "a port must be from 1 to 65535, got 0"),
        ("ipv4:10.0.0.1:50051,10.0.0.2:70000", "a port must be from 1 to 65535, got 70000"),
        ("a:1,b:2", "several are written ipv4:HOST:PORT,HOST:PORT"),
        ("", "the address is empty: it must be host:port"),
    ],
)
def test_what_nobody_can_listen_on_is_refused(address: str, problem: str) -> None:
    """gRPC asks at the lower 16 bits of a port, where somebody else may listen."""
    with pytest.raises(ValueError, match=problem):
        TlsOptions().of(address)


@pytest.mark.parametrize(
    ("address", "asked"),
    [
        ("127.0.0.1:65535", "127.0.0.1:65535"),
        ("http://127.0.0.1:8000/v1", "127.0.0.1:8000/v1"),
        ("grpc://gateway:50051/", "gateway:50051"),
        ("gateway", "gateway"),
        ("[fd00::1]", "[fd00::1]"),
        ("unix:/run/part:99999", "unix:/run/part:99999"),
    ],
)
def test_what_can_be_asked_is(address: str, asked: str) -> None:
    assert TlsOptions().of(address) == (asked, None)
