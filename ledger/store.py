"""The store of one cell: retried with the same identity, bound to its nonce, errors in our words.

Only this module knows what may be sent twice (everything sent here may) and for how long it makes
sense to try. Which server gets it is known below, in `ledger/servers`.
"""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from redis import exceptions as redis_errors

from ledger import scripts
from ledger.acl import keys_rule
from ledger.durability import SETTINGS
from ledger.keys import Keys
from ledger.scripts import Script
from ledger.servers.connections import Argument, Command, Connections
from ledger.servers.primary import OneServer, Route, servers_of
from ledger.servers.refusals import is_refusal, is_transient, raise_refusal, translated
from ledger.servers.urls import Address, StoreUrl, parse
from ledger.types import LedgerLimits, StoreLost
from service_kit.errors import ConfigError, Unavailable

SCHEMA: Final = 1
RETRY_WAIT_FIRST_S: Final = 0.02
# A script flushed away between two loads means somebody flushes in a loop; do not join in.
SCRIPT_LOADS_MAX: Final = 3
# How long replicas are waited for before everything is sent once more.
REPLICAS_WAIT_MS: Final = 1000
REPLICAS_TOLD_MS: Final = 100
# Commands of which every word behind the first is a key; of all others that are read it is one.
MANY_KEYS: Final = frozenset({"MGET", "EXISTS"})

INFO: Final = ("INFO", "server", "replication", "memory")

Call: TypeAlias = tuple[Script, Sequence[str], Sequence[Argument]]


class Store:
    """One cell's keys, wherever they are. Remembers the store's nonce and refuses to work on any
    other store.
    """

    def __init__(self, url: str, keys: Keys, limits: LedgerLimits) -> None:
        self.keys = keys
        self.limits = limits
        self._url = parse(url)
        servers = servers_of(self._url, keys.meta, timeout_s=limits.connect_timeout_s)
        self._route = Route(servers)
        self._connections = self._sockets(self._route)
        # Blocking reads have their own sockets: they must not starve short operations of permits.
        self._blocking = self._sockets(self._route)
        self._nonce: bytes | None = None
        self._bind_lock = asyncio.Lock()

    def _sockets(self, route: Route) -> Connections:
        return Connections(
            self._url,
            route,
            connections_max=self.limits.connections_max,
            connect_timeout_s=self.limits.connect_timeout_s,
        )

    @property
    def url(self) -> StoreUrl:
        """Without its password."""
        return self._url

    async def close(self) -> None:
        await self._connections.close()
        await self._blocking.close()
        await self._route.close()

    async def primary(self) -> Address:
        """Of the servers, asked now. ConfigError: they are not what the url says."""
        try:
            return await self._route.ask()
        except (redis_errors.RedisError, OSError) as error:
            raise translated(error) from error

    async def nonce(self) -> bytes:
        """The nonce of the store this object is bound to; binds at the first call."""
        if self._nonce is None:
            async with self._bind_lock:
                if self._nonce is None:
                    self._nonce = await self._bind()
        return self._nonce

    async def rebind(self) -> None:
        """Read the store's nonce again, creating an unused cell. StoreLost if it is another than
        before.
        """
        async with self._bind_lock:
            found = await self._bind()
            if self._nonce is not None and found != self._nonce:
                raise StoreLost
            self._nonce = found

    async def _bind(self) -> bytes:
        k = self.keys
        proposed = secrets.randbits(63) or 1
        call = (scripts.BIND, (k.meta, k.lease, k.inbox, k.journal, k.load), (SCHEMA, proposed))
        reply = (await self._run([call]))[0]
        if reply[0] == b"SCHEMA":
            raise ConfigError(
                f"ledger: cell {k.cell!r} was written with schema {reply[1].decode()}, but this"
                f" version reads schema {SCHEMA}. Fix: use another cell, or drain this one and"
                f" delete its keys {k.prefix}*"
            )
        if reply[0] == b"PARTIAL":
            raise ConfigError(
                f"ledger: {k.meta} must exist while cell {k.cell!r} has other keys; part of the"
                f" record was lost. Fix: restore the store, or delete the keys {k.prefix}* to start"
                " empty"
            )
        nonce: bytes = reply[1]
        return nonce

    async def script(
        self, script: Script, keys: Sequence[str], args: Sequence[Argument]
    ) -> list[Any]:
        """Run one script behind the meta key and the store nonce. The reply's first item is its
        verdict.
        """
        return (await self.run_scripts([(script, keys, args)]))[0]

    async def run_scripts(self, calls: Sequence[Call]) -> list[list[Any]]:
        """The same for several, in order, in one round trip and one transaction: who waits for a
        stream is woken once, for all of them.
        """
        nonce = await self.nonce()
        meta = self.keys.meta
        calls = [(s, (meta, *keys), (nonce, *args)) for s, keys, args in calls]
        is_promise = any(script in scripts.PROMISES for script, _, _ in calls)
        replies = await self._run(calls, replicas=self.limits.replicas_min if is_promise else 0)
        if any(reply[0] == b"STORE_LOST" for reply in replies):
            raise StoreLost
        return replies

    async def _run(self, calls: Sequence[Call], *, replicas: int = 0) -> list[list[Any]]:
        commands = [_evalsha(call) for call in calls]
        used = {script.sha: script for script, _, _ in calls}
        if replicas:
            used[scripts.BARRIER.sha] = scripts.BARRIER
        loads = [("SCRIPT", "LOAD", script.text) for script in used.values()]
        for _ in range(SCRIPT_LOADS_MAX):
            replies = await self.commands(
                commands,
                is_atomic=len(commands) > 1,
                asked=loads,
                behind=self._barrier(replicas),
            )
            if not any(isinstance(reply, redis_errors.NoScriptError) for reply in replies):
                return replies
            # A restarted server has an empty script cache. Those that did run are idempotent.
            await self.commands(loads)
        raise Unavailable("the ledger's server keeps forgetting our scripts")

    def _barrier(self, replicas: int) -> Sequence[Command]:
        """Wait until so many replicas have all that was written so far.

        A server waits for the last write of the connection, and what is sent once more writes
        nothing: so a write goes before it.
        """
        if not replicas:
            return ()
        write = _evalsha((scripts.BARRIER, (self.keys.meta,), ()))
        if self.limits.replicas_ack == "memory":
            return (write, ("WAIT", replicas, REPLICAS_WAIT_MS))
        # A replica is asked once by each of them, answers at once with what it had on disk before
        # this, and then only once a second. When it has told that it has it, it has written it.
        told: Command = ("WAIT", replicas, REPLICAS_TOLD_MS)
        return (write, told, ("WAITAOF", 0, replicas, REPLICAS_WAIT_MS))

    async def replicated(self) -> None:
        """Whatever was written so far is on as many replicas as a promise asks for."""
        if self.limits.replicas_min:
            await self._run((), replicas=self.limits.replicas_min)

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """Read-only commands as one snapshot of our own store."""
        args = [word for command in commands for word in (len(command), *command)]
        # Named, so that a server that has handed some of them on says so, not that there are none.
        keys = [str(key) for words in commands for key in _keys_of(words)]
        return (await self.script(scripts.READ, keys, args))[1:]

    async def read_stream(
        self, key: str, after_id: str, *, block_ms: int, count: int
    ) -> tuple[list[Any], int]:
        """Entries after an id, waiting up to block_ms for the first, and the store's clock then.
        Not retried; the caller's loop does.
        """
        nonce = await self.nonce()
        limits = self.limits
        block_ms = max(1, min(block_ms, limits.block_ms_max))
        commands = (
            ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", key, after_id),
            ("HGET", self.keys.meta, "nonce"),
            ("TIME",),
        )
        try:
            replies = await self._blocking.roundtrip(
                commands, timeout_s=limits.operation_timeout_s + block_ms / 1000
            )
            raise_refusal(replies)
        except (redis_errors.RedisError, OSError) as error:
            if is_transient(error):
                self._route.doubt()
            raise translated(error) from error
        if replies[1] != nonce:
            raise StoreLost
        entries: list[Any] = replies[0][0][1] if replies[0] else []
        return entries, time_ns(replies[2])

    async def commands(
        self,
        commands: Sequence[Command],
        *,
        is_atomic: bool = False,
        asked: Sequence[Command] | None = None,
        behind: Sequence[Command] = (),
    ) -> list[Any]:
        """One round trip, retried within limits.retry_s; NOSCRIPT comes back as a value. `asked`:
        see `Connections.roundtrip`. `behind`: what must be true, too; a WAIT is the last of it.
        """
        if is_atomic:
            commands = [("MULTI",), *commands, ("EXEC",)]
        sent = [*commands, *behind]
        timeout_s = self.limits.operation_timeout_s
        loop = asyncio.get_running_loop()
        give_up_at, wait_s = loop.time() + self.limits.retry_s, RETRY_WAIT_FIRST_S
        while True:
            try:
                replies = await self._connections.roundtrip(sent, timeout_s=timeout_s, asked=asked)
                raise_refusal(replies)
                if behind:
                    replies, (barrier, *_, found) = (
                        replies[: len(commands)],
                        replies[len(commands) :],
                    )
                    if isinstance(barrier, redis_errors.NoScriptError):
                        return [barrier]
                    _require_replicas(found, behind[-1])
                if is_atomic:
                    replies = replies[-1]
                    raise_refusal(replies)
                return replies
            except (redis_errors.RedisError, OSError) as error:
                if not is_transient(error) or loop.time() + wait_s > give_up_at:
                    raise translated(error) from error
                self._route.doubt()
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.limits.retry_wait_s_max)

    async def facts(self) -> Mapping[str, str]:
        """Of the primary, and of its settings those that matter; what cannot be read is absent."""
        (text,) = await self.commands((INFO,))
        try:
            replies = await self.commands(_get_settings())
        except (Unavailable, redis_errors.ResponseError) as error:
            if is_refusal(error):
                return _facts(text, ())
            raise
        return _facts(text, replies)

    async def facts_of_replicas(self) -> Mapping[Address, Mapping[str, str]]:
        """The same of those that may be primary one day, as far as they answer."""
        facts = {}
        try:
            for address in await self._route.servers.replicas():
                facts[address] = _facts(*await self._ask_replica(address))
        except (redis_errors.RedisError, OSError, TimeoutError):
            # Whoever is away is looked at when it is back, or leads.
            pass
        return facts

    async def _ask_replica(self, address: Address) -> tuple[bytes, list[Any]]:
        connections = self._sockets(Route(OneServer(address)))
        try:
            text, *replies = await connections.roundtrip(
                (INFO, *_get_settings()), timeout_s=self.limits.connect_timeout_s
            )
            raise_refusal((text,))
            return text, replies
        finally:
            await connections.close()

    async def refused_commands(self, commands: Sequence[str]) -> list[str]:
        """Those that the url's user may not use. ConfigError: it may not even ask with our keys."""
        try:
            _, *refused = (await self._run([(scripts.PERMITTED, (self.keys.meta,), commands)]))[0]
        except Unavailable as error:
            if not isinstance(error.__cause__, redis_errors.NoPermissionError):
                raise
            raise ConfigError(
                f"ledger: the store's user must be allowed the keys {self.keys.prefix}*, EVALSHA"
                f" and SCRIPT LOAD; it said: {error.__cause__}. Fix: ACL SETUSER USER"
                f" {keys_rule(self.keys.cell)}, and its commands as in deploy/valkey-commands.acl"
            ) from error
        return [name.decode() for name in refused]


def time_ns(reply: Sequence[bytes]) -> int:
    """Of TIME."""
    return int(reply[0]) * 1_000_000_000 + int(reply[1]) * 1000


def _get_settings() -> list[Command]:
    return [("CONFIG", "GET", setting) for setting in SETTINGS]


def _facts(text: bytes, settings: Sequence[Any]) -> Mapping[str, str]:
    lines = (line.partition(":") for line in text.decode().splitlines())
    facts = {name: value for name, _, value in lines}
    found = zip(SETTINGS, settings, strict=False)
    return facts | {
        name: reply[1].decode() for name, reply in found if isinstance(reply, list) and reply
    }


def _evalsha(call: Call) -> Command:
    script, keys, args = call
    return ("EVALSHA", script.sha, len(keys), *keys, *args)


def _keys_of(command: Command) -> Sequence[Argument]:
    return command[1:] if command[0] in MANY_KEYS else command[1:2]


def _require_replicas(found: Any, asked: Command) -> None:
    """Raises what is transient: they may come back."""
    wanted = int(asked[1] if asked[0] == "WAIT" else asked[2])
    count = found if asked[0] == "WAIT" else found[1]
    if count < wanted:
        raise redis_errors.ConnectionError(
            f"{wanted} replicas of the store must have what is promised (store-replicas-min),"
            f" {count} do"
        )
