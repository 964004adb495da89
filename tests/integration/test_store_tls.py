"""The ledger through TLS, which ends before the store: who is not trusted is told nothing."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from ledger import Ledger
from service_kit.errors import ConfigError, Unavailable
from tests.support.relay import Relay
from tests.support.tls_files import EXPIRED, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


def before(redis_url: str, authority: Authority, *names: str, **validity: Any) -> Relay:
    """A port that speaks TLS, by a certificate for these names."""
    files = authority.issue(*names, **validity)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    return Relay(redis_url.removeprefix("redis://").partition("/")[0], tls=context)


async def check(url: str, cell: str) -> None:
    ledger = await Ledger.connect(url, cell=cell)
    try:
        await ledger.check()
    finally:
        await ledger.close()


async def test_the_ledger_speaks_tls(redis_url: str, authority: Authority, cell: str) -> None:
    async with before(redis_url, authority) as relay:
        await check(f"rediss://{relay.address}/0?ssl_ca_certs={authority.pem}", cell)
        assert relay.connections


@pytest.mark.parametrize("wrong", ["authority", "name", "expired"])
async def test_a_store_that_is_not_trusted_is_told_nothing(
    redis_url: str, authority: Authority, cell: str, tmp_path: Path, wrong: str
) -> None:
    names = ("store.example",) if wrong == "name" else ()
    trusted = Authority(tmp_path / "other").pem if wrong == "authority" else authority.pem
    relay = before(redis_url, authority, *names, **(EXPIRED if wrong == "expired" else {}))
    async with relay:
        with pytest.raises(Unavailable, match=r"its certificate is refused: .*ssl_ca_certs"):
            await check(f"rediss://{relay.address}/0?ssl_ca_certs={trusted}", cell)
        assert relay.connections == []


async def test_an_authority_that_is_no_file_ends_the_start(cell: str) -> None:
    with pytest.raises(ConfigError, match=r"ssl_ca_certs: /nowhere/ca\.pem"):
        await check("rediss://127.0.0.1:1/0?ssl_ca_certs=/nowhere/ca.pem", cell)
