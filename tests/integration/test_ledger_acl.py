"""The store's user of `ledger/acl.py` can do all that the ledger does, and nothing else.

Tests of the ledger run here once more, as that user: `ledger` below is theirs.
"""

import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from ledger import Ledger, acl, scripts
from ledger.keys import Keys
from ledger.servers.commands import ALL, IF_ALLOWED
from tests.integration.test_ledger_leader import (  # noqa: F401
    test_a_batch_may_be_sent_again_as_a_whole,
    test_a_leader_that_ends_amid_a_fold_loses_no_token_and_folds_none_twice,
    test_commit_fences_repeats_and_gaps,
    test_ending_twice_releases_the_counters_once,
    test_folding_is_idempotent_and_loses_no_token_at_any_point,
    test_of_a_leader_that_has_ended_no_renewal_counts_but_its_successors_do,
)
from tests.integration.test_ledger_submit import (  # noqa: F401
    test_another_body_under_the_same_id_is_refused_and_changes_nothing,
)

ROOT = Path(__file__).parents[2]
PASSWORD = "of-the-services"


@pytest.fixture
def user_url(redis_url: str, cell: str) -> Iterator[str]:
    """The session's store as that user, for this cell."""
    rules = f"on >{PASSWORD} {acl.keys_rule(cell)} {acl.commands_rule()}".split()
    with Redis.from_url(redis_url) as admin:
        admin.execute_command("ACL", "SETUSER", f"kaiten-{cell}", "reset", *rules)
        yield redis_url.replace("redis://", f"redis://kaiten-{cell}:{PASSWORD}@")
        admin.execute_command("ACL", "DELUSER", f"kaiten-{cell}")


@pytest.fixture
async def ledger(user_url: str, cell: str) -> AsyncIterator[Ledger]:
    ledger = await Ledger.connect(user_url, cell=cell)
    await ledger.check()
    yield ledger
    await ledger.close()


@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "FLUSHDB", "CONFIG SET maxmemory 1", "KEYS *", "SCAN 0", "ACL LIST", "SHUTDOWN",
     "SCRIPT FLUSH", "EVAL return(1) 0", "MONITOR", "CLUSTER INFO", "REPLICAOF 192.0.2.1 1",
     "MODULE LIST", "SAVE", "CLIENT LIST", "SELECT 1", "PUBLISH a b", "SUBSCRIBE a"],
)  # fmt: skip
def test_what_the_ledger_never_does_is_refused(user_url: str, command: str) -> None:
    with Redis.from_url(user_url) as user, pytest.raises(NoPermissionError):
        user.execute_command(*command.split())


def test_another_cells_keys_are_refused(user_url: str, cell: str) -> None:
    with Redis.from_url(user_url) as user:
        user.hset(Keys(cell).meta, "nonce", 5)
        read = user.script_load(scripts.READ.text)
        for other in (f"{cell}0", "", "*"):
            with pytest.raises(NoPermissionError):
                user.get(Keys(other).meta)
            # Neither by one of our own scripts, whether or not the key is declared.
            with pytest.raises(NoPermissionError):
                user.evalsha(read, 1, Keys(other).meta, 5)
            with pytest.raises(ResponseError, match=r"ACL failure|permission"):
                user.evalsha(read, 1, Keys(cell).meta, 5, 2, "GET", Keys(other).meta)


def test_a_cell_named_like_a_pattern_has_its_own_keys_only(redis_url: str) -> None:
    name = "kaiten-pattern"
    with Redis.from_url(redis_url) as admin:
        admin.execute_command(
            *("ACL", "SETUSER", name, "reset", "on", f">{PASSWORD}"),
            *f"{acl.keys_rule('a[b]*')} {acl.commands_rule()}".split(),
        )
        try:
            with Redis.from_url(redis_url.replace("//", f"//{name}:{PASSWORD}@")) as user:
                assert user.get(Keys("a[b]*").meta) is None
                for other in ("ab", "a[b]c", "abc"):
                    with pytest.raises(NoPermissionError):
                        user.get(Keys(other).meta)
        finally:
            admin.execute_command("ACL", "DELUSER", name)


def test_every_command_is_one_that_the_ledger_uses() -> None:
    lua = "".join(path.read_text() for path in (ROOT / "ledger" / "lua").glob("*.lua"))
    called = {name.lower() for name in re.findall(r"redis\.p?call\('(\w+)'", lua)}
    python = "".join(path.read_text() for path in (ROOT / "ledger").rglob("*.py"))
    words = {name.lower() for name in re.findall(r"\"([A-Z]{3,})\"", python)}
    assert called <= set(ALL)
    # redis-py's own.
    of_the_connection = {*IF_ALLOWED, "cluster|slots"}
    for name in set(ALL) - of_the_connection:
        assert set(name.split("|")) <= called | words, name
