"""Conversations in the ledger: changed by one at a time, bounded by tenant, gone in their time."""

from functools import partial
from typing import Any

import pytest
from redis.asyncio import Redis

from ledger import Ledger, LedgerLimits
from ledger.batches import conversations as module
from ledger.batches.conversations import CONVERSATION_BYTES
from ledger.batches.files import FILE_BYTES_MIN
from ledger.batches.shelf import Page
from service_kit.errors import AlreadyExists, NotFound, Overloaded


async def left_over(ledger: Ledger, client: Redis) -> tuple[int, int]:
    """Bytes that count, and by their sum."""
    *_, leaving, total = ledger.keys.shelf("alice")
    members: list[Any] = await client.zrange(leaving, 0, -1)
    return sum(int(each.rsplit(b" ", 1)[1]) for each in members), int(await client.get(total) or 0)


async def test_who_was_first_changes_it(redis_url: str, cell: str) -> None:
    ledger = await Ledger.connect(redis_url, cell=cell)
    conversations = ledger.conversations
    made = await conversations.new("alice", "conv_1", b"a")
    assert await conversations.find("alice", "conv_1") == made
    changed = await conversations.change("alice", made, b"ab")
    assert changed is not None
    assert changed.created_at == made.created_at
    assert await conversations.change("alice", made, b"ac") is None
    assert await conversations.find("alice", "conv_1") == changed
    for ask in (
        partial(conversations.find, "bob", "conv_1"),
        partial(conversations.change, "bob", changed, b"x"),
        partial(conversations.drop, "bob", "conv_1"),
    ):
        with pytest.raises(NotFound, match=r"48 h \(--files-hours\) after their last change"):
            await ask()
    await conversations.drop("alice", "conv_1")
    with pytest.raises(NotFound):
        await conversations.change("alice", changed, b"x")
    await ledger.close()


async def test_a_change_sent_again_is_one(
    redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may know whether it was heard."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    monkeypatch.setattr(module.secrets, "token_hex", lambda _: "1")  # type: ignore[attr-defined]
    made = await ledger.conversations.new("alice", "conv_1", b"a")
    assert await ledger.conversations.new("alice", "conv_1", b"a") == made
    async with Redis.from_url(redis_url) as client:
        assert await left_over(ledger, client) == (CONVERSATION_BYTES + 1,) * 2
        monkeypatch.undo()
        with pytest.raises(AlreadyExists, match="conv_1"):
            await ledger.conversations.new("alice", "conv_1", b"another")
        assert await ledger.conversations.find("alice", "conv_1") == made
        assert await left_over(ledger, client) == (CONVERSATION_BYTES + 1,) * 2
    await ledger.close()


async def test_what_a_tenant_keeps_is_counted_with_its_files(redis_url: str, cell: str) -> None:
    limits = LedgerLimits(files_bytes_max=FILE_BYTES_MIN + 2 * CONVERSATION_BYTES + 100)
    ledger = await Ledger.connect(redis_url, cell=cell, limits=limits)
    conversations = ledger.conversations
    await ledger.files.put("alice", "file-1", 0, b"a")
    about: Any = {"filename": "f", "purpose": "batch", "size_bytes": 1, "chunks": 1}
    await ledger.files.keep("alice", "file-1", **about)
    one = await conversations.new("alice", "conv_1", b"x" * 100)
    two = await conversations.new("alice", "conv_2", b"")
    for ask in (
        partial(conversations.new, "alice", "conv_3", b""),
        partial(conversations.change, "alice", two, b"y"),
        partial(conversations.change, "alice", one, b"x" * 101),
    ):
        with pytest.raises(Overloaded, match="files, batches and conversations of tenant alice"):
            await ask()
    await conversations.new("bob", "conv_3", b"")
    # Smaller it is taken, and the other may grow.
    smaller = await conversations.change("alice", one, b"x" * 50)
    assert await conversations.change("alice", two, b"y" * 50) is not None
    async with Redis.from_url(redis_url) as client:
        assert await left_over(ledger, client) == (limits.files_bytes_max,) * 2
        await conversations.drop("alice", "conv_2")
        assert smaller is not None
        assert await conversations.change("alice", smaller, b"x" * 100) is not None
        assert (await left_over(ledger, client))[0] == FILE_BYTES_MIN + CONVERSATION_BYTES + 100
        # Files are listed without them.
        assert await ledger.files.page("alice", Page(10)) == (["file-1"], False)
    await ledger.close()


async def test_so_many_of_a_tenant(
    redis_url: str, cell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONVERSATIONS_MAX", 2)
    ledger = await Ledger.connect(redis_url, cell=cell)
    await ledger.files.put("alice", "file-1", 0, b"a")
    about: Any = {"filename": "f", "purpose": "batch", "size_bytes": 1, "chunks": 1}
    await ledger.files.keep("alice", "file-1", **about)
    one = await ledger.conversations.new("alice", "conv_1", b"")
    await ledger.conversations.new("alice", "conv_2", b"")
    with pytest.raises(Overloaded, match="too many conversations of tenant alice"):
        await ledger.conversations.new("alice", "conv_3", b"")
    assert await ledger.conversations.change("alice", one, b"x") is not None
    await ledger.conversations.drop("alice", "conv_2")
    await ledger.conversations.new("alice", "conv_3", b"")
    await ledger.close()


async def test_one_whose_time_is_over_counts_no_more(redis_url: str, cell: str) -> None:
    """Also if the sum forgets it a moment before the store does."""
    ledger = await Ledger.connect(redis_url, cell=cell)
    made = await ledger.conversations.new("alice", "conv_1", b"a")
    *_, leaving, _ = ledger.keys.shelf("alice")
    async with Redis.from_url(redis_url) as client:
        ttl_s = await client.ttl(ledger.keys.conversation("alice", "conv_1"))
        assert 48 * 3600 - 60 < ttl_s <= 48 * 3600
        await client.zadd(leaving, {f"conv_1 {CONVERSATION_BYTES + 1}": 1}, xx=True)
        await ledger.conversations.new("alice", "conv_2", b"")
        assert await left_over(ledger, client) == (CONVERSATION_BYTES,) * 2
        assert await ledger.conversations.change("alice", made, b"ab") is not None
        assert await left_over(ledger, client) == (2 * CONVERSATION_BYTES + 2,) * 2
    await ledger.close()
