"""What a store must promise: each rule refused by its own sentence, which says how to meet it."""

import pytest

from ledger.durability import check_store, is_full
from service_kit.errors import ConfigError

GOOD = {
    "redis_version": "7.2.4",
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
}


def test_a_good_store_passes() -> None:
    check_store(GOOD, allow_everysec=False)
    check_store(GOOD, allow_everysec=True)
    check_store({**GOOD, "appendfsync": "everysec"}, allow_everysec=True)
    check_store({**GOOD, "redis_version": "10.0.1"}, allow_everysec=False)


@pytest.mark.parametrize(
    ("setting", "value", "sentence"),
    [
        (
            "redis_version",
            "7.0.15",
            r"must be Redis 7\.2 or newer, or Valkey; found Redis 7\.0\.15",
        ),
        ("appendonly", "no", r"appendonly must be yes.*Fix: CONFIG SET appendonly yes"),
        ("appendfsync", "everysec", r"appendfsync must be always, or a crash"),
        ("appendfsync", "no", r"Fix: CONFIG SET appendfsync always"),
        ("no-appendfsync-on-rewrite", "yes", r"must be no"),
        ("maxmemory-policy", "allkeys-lru", r"must be noeviction, or accepted requests may be ev"),
    ],
)
def test_each_rule_has_its_sentence(setting: str, value: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_store({**GOOD, setting: value}, allow_everysec=False)


def test_what_may_not_be_read_is_not_assumed() -> None:
    facts = {name: value for name, value in GOOD.items() if name != "appendonly"}
    with pytest.raises(ConfigError, match=r"allow this user \+config\|get"):
        check_store(facts, allow_everysec=True)


def test_everysec_is_the_only_weaker_setting_ever_allowed() -> None:
    with pytest.raises(ConfigError, match="appendfsync must be always or everysec"):
        check_store({**GOOD, "appendfsync": "no"}, allow_everysec=True)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, False),
        ({"maxmemory": "0", "used_memory": "900"}, False),
        ({"maxmemory": "1000", "used_memory": "1000"}, False),
        ({"maxmemory": "1000", "used_memory": "1001"}, True),
        ({"maxmemory": "1000", "used_memory": "1001", "mem_not_counted_for_evict": "1"}, False),
    ],
)
def test_it_is_full_as_the_server_counts(facts: dict[str, str], expected: bool) -> None:
    assert is_full(facts) is expected
