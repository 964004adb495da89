"""A url of the ledger that cannot be read is refused without showing what stands in it."""

import traceback
from pathlib import Path

import pytest

from ledger.servers.urls import Address, first_address, parse
from service_kit.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:pa55/word@host:6379",
        "redis://me:pa55#word@host:6379",
        "redis://me:pa55@[host:6379",
        "http://me:pa55@host:6379",
        "redis+cluster://me:pa55/word@host:6379,other",
        "redis+sentinel://me:pa55@:6379,other/name",
        "redis+other://me:pa55@host/name",
        "redis+cluster://me:pa55@host:port",
    ],
)
def test_a_wrong_url_is_explained_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis://, rediss:// or unix://.*%2F") as caught:
        parse(url)
    said = "".join(traceback.format_exception(caught.value, limit=0))
    assert "'pa" not in said
    assert "pa55" not in said


def test_a_cluster_is_named_by_some_of_its_servers() -> None:
    url = parse("redis+cluster://me:p%40ss@a,b:7000,[::1]:7001/0?socket_connect_timeout=3")
    assert url.kind == "cluster"
    assert url.addresses == (Address("a", 6379), Address("b", 7000), Address("::1", 7001))
    assert (url.options["username"], url.options["password"]) == ("me", "p@ss")
    assert url.options["socket_connect_timeout"] == 3.0
    assert "host" not in url.options
    assert "p@ss" not in repr(url)


def test_sentinels_have_credentials_of_their_own(tmp_path: Path) -> None:
    authority = tmp_path / "ca.pem"
    authority.touch()
    url = parse(
        "rediss+sentinel://me:pw@s1,s2:26380/ledger/2?sentinel_username=watch"
        f"&sentinel_password=w&ssl_ca_certs={authority}"
    )
    assert (url.kind, url.name, url.options["db"]) == ("sentinel", "ledger", 2)
    assert url.addresses == (Address("s1", 26379), Address("s2", 26380))
    assert url.options["password"] == "pw"
    assert "sentinel_password" not in url.options
    assert url.sentinel_options == {
        "username": "watch", "password": "w", "ssl_ca_certs": str(authority),
    }  # fmt: skip
    assert "SSL" in url.connection_class.__name__


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("redis+cluster://a,b/1", "database 0 and no other, got /1"),
        ("redis+sentinel://a,b", r"must name what they watch, redis\+sentinel://HOST,HOST/NAME"),
        ("rediss+cluster://a?ssl_ca_certs=/nowhere.pem", r"ssl_ca_certs: /nowhere\.pem is no file"),
    ],
)
def test_what_is_missing_is_said(url: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        parse(url)


def test_the_way_to_the_store_begins_at_its_first_server() -> None:
    assert first_address("redis+sentinel://u:p@s1,s2/ledger") == "s1:26379"
    assert first_address("redis://store:7000/0") == "store:7000"
    assert first_address("unix:///run/store.sock") == ":6379"
