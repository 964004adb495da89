"""The connection to Redis or Valkey: bounded, retried with the same identity, errors in our words.

redis-py gives the sockets and the protocol; its own retries are off, because only this module knows
what may be sent twice (everything sent here may) and for how long it makes sense to try.
"""

import asyncio
import secrets
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from ledger import scripts
from ledger.durability import SETTINGS
from ledger.keys import Keys
from ledger.scripts import Script
from ledger.types import LedgerLimits, StoreLost
from service_kit.errors import ConfigError, Unavailable

SCHEMA: Final = 1
RETRY_WAIT_FIRST_S: Final = 0.02
# A script flushed away between two loads means somebody flushes in a loop; do not join in.
SCRIPT_LOADS_MAX: Final = 3

# Refusals of a server that is well but not ready: by the first word of the error.
TRANSIENT: Final = frozenset(
    {
        "LOADING",
        "BUSY",
        "MISCONF",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "READONLY",
        "NOREPLICAS",
    }
)
REFUSALS: Final = {
    "OOM": "the ledger's store is out of memory",
    "NOPERM": "the ledger's user lacks a permission",
}

Argument: TypeAlias = str | bytes | int
Command: TypeAlias = Sequence[Argument]
Call: TypeAlias = tuple[Script, Sequence[str], Sequence[Argument]]


def _code(error: Exception) -> str:
    """First word of a server's refusal, also when redis-py has made a class of it and cut the word
    off.
    """
    text = str(error)
    known = {
        redis_errors.OutOfMemoryError: "OOM",
        redis_errors.ReadOnlyError: "READONLY",
        redis_errors.NoPermissionError: "NOPERM",
        redis_errors.MasterDownError: "MASTERDOWN",
        redis_errors.ClusterDownError: "CLUSTERDOWN",
        redis_errors.TryAgainError: "TRYAGAIN",
    }
    return known.get(type(error)) or text.split(" ", 1)[0].lstrip("-")


def _translated(error: Exception) -> Exception:
    if isinstance(error, redis_errors.AuthenticationError):
        return ConfigError(
            f"ledger: the store must accept the url's user and password; it said: {error}."
            " Fix: put them into the ledger url, redis://user:password@host:port"
        )
    if isinstance(error, redis_errors.ResponseError):
        reason = REFUSALS.get(_code(error))
        if reason is None and _code(error) not in TRANSIENT:
            return error
        return Unavailable(f"{reason or 'the ledger is not ready'}: {error}")
    if isinstance(refused := error.__context__, ssl.SSLCertVerificationError):
        return Unavailable(
            f"the ledger cannot be reached: its certificate is refused: {refused.verify_message}."
            " Fix: name the file of its authority in the ledger url, rediss://…?ssl_ca_certs=FILE,"
            " and dial a name that is in the certificate"
        )
    return Unavailable(f"the ledger cannot be reached: {str(error) or 'no answer in time'}")


def _is_transient(error: Exception) -> bool:
    if isinstance(error, redis_errors.ResponseError):
        return _code(error) in TRANSIENT
    if isinstance(error.__context__, ssl.SSLCertVerificationError):
        return False
    return not isinstance(error, redis_errors.AuthenticationError)


class Connections:
    """A bounded set of sockets, each used by one caller at a time, last used first."""

    def __init__(self, url: str, limits: LedgerLimits, *, timeout_s: float) -> None:
        try:
            options: dict[str, Any] = dict(parse_url(url))
        except ValueError:
            # Not what was wrong with it: of a password with a "/" that would be the beginning.
            raise ConfigError(
                "ledger url: it must be redis://, rediss:// or unix://, and in a password / is"
                " written %2F, # %23, ? %3F, @ %40 and : %3A"
            ) from None
        for name in ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"):
            if (file := options.get(name)) is not None and not Path(file).is_file():
                raise ConfigError(f"ledger url: {name}: {file} is no file")
        self._class: type[AbstractConnection] = options.pop("connection_class", Connection)
        # One timeout around the whole exchange; redis-py's own would cost a task per command.
        self._timeout_s = timeout_s
        options["socket_timeout"] = None
        options.setdefault("socket_connect_timeout", limits.connect_timeout_s)
        self._options = {**options, "retry": Retry(NoBackoff(), 0), "protocol": 2}
        self._free: list[AbstractConnection] = []
        self._permits = asyncio.Semaphore(limits.connections_max)
        self._is_closed = False

    async def roundtrip(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands in one write and read their replies; refusals come back as values."""
        async with asyncio.timeout(self._timeout_s), self._permits:
            connection = self._free.pop() if self._free else self._class(**self._options)
            try:
                replies = await self._exchange(connection, commands)
            except BaseException as error:
                # Replies may be under way: nobody must read them as answers to another question.
                await connection.disconnect(nowait=True)
                if isinstance(error, (redis_errors.ConnectionError, OSError)):
                    await self._drop_free()
                raise
            if self._is_closed:
                await connection.disconnect(nowait=True)
            else:
                self._free.append(connection)
            return replies

    async def _exchange(
        self, connection: AbstractConnection, commands: Sequence[Command]
    ) -> list[Any]:
        if not connection.is_connected:
            await connection.connect()  # type: ignore[no-untyped-call]
        # Its stub knows of commands with one word only.
        packed = b"".join([pack_command(tuple(each)) for each in commands])  # type: ignore[arg-type]
        await connection.send_packed_command(packed, check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response())
            except redis_errors.ResponseError as error:
                replies.append(error)
        return replies

    async def _drop_free(self) -> None:
        # One broken socket usually means a restarted server: the idle ones are dead too.
        stale, self._free = self._free, []
        for connection in stale:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        self._is_closed = True
        await self._drop_free()


class Store:
    """One cell's keys on one server. Remembers the store's nonce and refuses to work on any other
    store.
    """

    def __init__(self, url: str, keys: Keys, limits: LedgerLimits) -> None:
        self.keys = keys
        self.limits = limits
        self._connections = Connections(url, limits, timeout_s=limits.operation_timeout_s)
        # Blocking reads have their own sockets: they must not starve short operations of permits.
        block_s_max = limits.block_ms_max / 1000
        self._blocking = Connections(
            url, limits, timeout_s=limits.operation_timeout_s + block_s_max
        )
        self._nonce: bytes | None = None
        self._bind_lock = asyncio.Lock()

    async def close(self) -> None:
        await self._connections.close()
        await self._blocking.close()

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
        replies = await self._run([(s, (meta, *keys), (nonce, *args)) for s, keys, args in calls])
        if any(reply[0] == b"STORE_LOST" for reply in replies):
            raise StoreLost
        return replies

    async def _run(self, calls: Sequence[Call]) -> list[list[Any]]:
        commands = [("EVALSHA", s.sha, len(keys), *keys, *args) for s, keys, args in calls]
        for _ in range(SCRIPT_LOADS_MAX):
            replies = await self.commands(commands, is_atomic=len(commands) > 1)
            if not any(isinstance(reply, redis_errors.NoScriptError) for reply in replies):
                return replies
            # A restarted server has an empty script cache. Those that did run are idempotent.
            used = {script.sha: script for script, _, _ in calls}
            await self.commands([("SCRIPT", "LOAD", script.text) for script in used.values()])
        raise Unavailable("the ledger's server keeps forgetting our scripts")

    async def read(self, commands: Sequence[Command]) -> list[Any]:
        """Read-only commands as one snapshot of our own store."""
        args = [word for command in commands for word in (len(command), *command)]
        return (await self.script(scripts.READ, (), args))[1:]

    async def read_stream(
        self, key: str, after_id: str, *, block_ms: int, count: int
    ) -> tuple[list[Any], int]:
        """Entries after an id, waiting up to block_ms for the first, and the store's clock then.
        Not retried; the caller's loop does.
        """
        nonce = await self.nonce()
        block_ms = max(1, min(block_ms, self.limits.block_ms_max))
        commands = (
            ("XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS", key, after_id),
            ("HGET", self.keys.meta, "nonce"),
            ("TIME",),
        )
        try:
            replies = await self._blocking.roundtrip(commands)
        except (redis_errors.RedisError, OSError) as error:
            raise _translated(error) from error
        _raise_refusal(replies)
        if replies[1] != nonce:
            raise StoreLost
        entries: list[Any] = replies[0][0][1] if replies[0] else []
        return entries, time_ns(replies[2])

    async def commands(self, commands: Sequence[Command], *, is_atomic: bool = False) -> list[Any]:
        """One round trip, retried within limits.retry_s; NOSCRIPT comes back as a value."""
        if is_atomic:
            commands = [("MULTI",), *commands, ("EXEC",)]
        loop = asyncio.get_running_loop()
        give_up_at, wait_s = loop.time() + self.limits.retry_s, RETRY_WAIT_FIRST_S
        while True:
            try:
                replies = await self._connections.roundtrip(commands)
                _raise_refusal(replies)
                if is_atomic:
                    replies = replies[-1]
                    _raise_refusal(replies)
                return replies
            except (redis_errors.RedisError, OSError) as error:
                if not _is_transient(error) or loop.time() + wait_s > give_up_at:
                    raise _translated(error) from error
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, self.limits.retry_wait_s_max)

    async def facts(self) -> Mapping[str, str]:
        """Server facts and the settings that matter; those that cannot be read are absent."""
        (text,) = await self.commands([("INFO", "server")])
        lines = (line.partition(":") for line in text.decode().splitlines())
        facts = {name: value for name, _, value in lines}
        try:
            replies = await self.commands([("CONFIG", "GET", setting) for setting in SETTINGS])
        except (Unavailable, redis_errors.ResponseError) as error:
            if _is_refusal(error):
                return facts
            raise
        found = zip(SETTINGS, replies, strict=True)
        return facts | {setting: reply[1].decode() for setting, reply in found if reply}


def time_ns(reply: Sequence[bytes]) -> int:
    """Of TIME."""
    return int(reply[0]) * 1_000_000_000 + int(reply[1]) * 1000


def _is_refusal(error: BaseException) -> bool:
    cause = error.__cause__ or error
    return isinstance(cause, redis_errors.ResponseError) and not _is_transient(cause)


def _raise_refusal(replies: Sequence[Any]) -> None:
    for reply in replies:
        if isinstance(reply, redis_errors.RedisError) and not isinstance(
            reply, redis_errors.NoScriptError
        ):
            raise reply
