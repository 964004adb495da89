"""What a client of the HTTP API judges its server by."""

import ssl

import pytest

from kaiten.tls import TLS, verifier


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
