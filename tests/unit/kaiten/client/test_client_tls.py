"""What a client judges its server by, and who it is."""

import ssl
from pathlib import Path

import pytest

from kaiten.client import Client
from kaiten.tls import TLS, verifier
from tests.support.tls_files import Authority, encrypted


def test_certificates_are_read_only_where_a_server_has_one() -> None:
    assert verifier("http://localhost:8080", None) is False
    found = verifier("https://localhost:8080", None)
    assert isinstance(found, ssl.SSLContext)
    assert found.verify_mode == ssl.CERT_REQUIRED
    assert found.check_hostname


@pytest.mark.parametrize("url", ["http://localhost", "https://localhost"])
def test_a_file_that_cannot_be_read_is_named(url: str) -> None:
    with pytest.raises(ValueError, match=r"tls: /none\.pem cannot be used"):
        verifier(url, TLS(ca="/none.pem"))


@pytest.mark.parametrize("wrong", ["authorities", "pair", "password"])
def test_files_that_no_handshake_can_use_are_named(wrong: str, tmp_path: Path) -> None:
    """gRPC takes what they hold, and every connection fails for a reason that it does not tell."""
    authority = Authority(tmp_path / "authority")
    own, other = authority.issue(), authority.issue()
    tls = {
        "authorities": TLS(ca=own.key),
        "pair": TLS(cert=own.cert, key=other.key),
        "password": TLS(cert=own.cert, key=encrypted(own.key, tmp_path)),
    }
    with pytest.raises(ValueError, match=r"tls: /.*\.pem cannot be used: "):
        Client("localhost:1", tls=tls[wrong])
