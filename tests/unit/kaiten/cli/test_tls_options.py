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
