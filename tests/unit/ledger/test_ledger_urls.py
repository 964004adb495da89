"""A url of the ledger that cannot be read is refused without showing what stands in it."""

import traceback

import pytest

from ledger.store import Connections
from ledger.types import LedgerLimits
from service_kit.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:pa55/word@host:6379",
        "redis://me:pa55#word@host:6379",
        "redis://me:pa55@[host:6379",
        "http://me:pa55@host:6379",
    ],
)
def test_a_wrong_url_is_explained_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"redis://, rediss:// or unix://.*%2F") as caught:
        Connections(url, LedgerLimits(), timeout_s=1.0)
    said = "".join(traceback.format_exception(caught.value, limit=0))
    assert "'pa" not in said
    assert "pa55" not in said
