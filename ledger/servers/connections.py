"""Sockets to the server that holds the cell's keys: bounded, and never by two callers at a time.

redis-py gives sockets, protocol, TLS and logins. Its clients of clusters and Sentinels say where to
go (ledger/servers/primary.py) but carry no command: they send again by themselves, and only the
ledger knows what may be sent twice and for how long that makes sense. All keys of a cell are in
one slot, so a whole pipeline has one place to go to, and MOVED and ASK speak of all of it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from hiredis import pack_command
from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo

from ledger.servers.primary import Route
from ledger.servers.refusals import NotPrimary, raise_refusal
from ledger.servers.urls import Address, StoreUrl

Argument: TypeAlias = str | bytes | int
Command: TypeAlias = Sequence[Argument]

# A slot that moves on moves once; more of it is a cluster that has not agreed yet.
REDIRECTS_MAX: Final = 3
# Who gives up sooner has not waited for the server.
DOUBT_AFTER_S: Final = 0.5
# What CLIENT LIST shows. Left to itself, each socket reads redis-py's metadata for its version.
_DRIVER: Final = DriverInfo()


class Connections:
    """A bounded set of sockets, each used by one caller at a time, last used first."""

    def __init__(
        self, url: StoreUrl, route: Route, *, connections_max: int, connect_timeout_s: float
    ) -> None:
        self._class = url.connection_class
        # One timeout around the whole exchange; redis-py's own would cost a task per command.
        self._options: dict[str, Any] = {
            "socket_connect_timeout": connect_timeout_s,
            **url.options,
            "socket_timeout": None,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": _DRIVER,
        }
        self._route = route
        route.on_move(self._leave_others)
        self._free: list[tuple[Address, AbstractConnection]] = []
        self._busy: dict[AbstractConnection, Address] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._permits = asyncio.Semaphore(connections_max)
        self._is_closed = False

    async def roundtrip(
        self,
        commands: Sequence[Command],
        *,
        timeout_s: float,
        asked: Sequence[Command] | None = None,
    ) -> list[Any]:
        """Send all commands in one write and read their replies; refusals come back as values.

        A server that says who has the keys now is believed. `asked`: what goes before them where
        they are while they move there; None: then they are not sent there.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with asyncio.timeout(timeout_s), self._permits:
                for _ in range(REDIRECTS_MAX):
                    address = await self._address()
                    replies = await self._send(address, commands)
                    redirect = _redirect(replies)
                    if redirect is None or not self._route.servers.is_redundant:
                        return replies
                    there = Address(redirect.host or address.host, redirect.port)
                    if isinstance(redirect, redis_errors.MovedError):
                        self._route.moved(there)
                    elif asked is None:
                        return replies
                    else:
                        return await self._send_asked(there, commands, asked)
                return replies
        except (redis_errors.ConnectionError, redis_errors.ReadOnlyError, OSError):
            self._route.doubt()
            raise
        except asyncio.CancelledError:
            if loop.time() - started_s > DOUBT_AFTER_S:
                self._route.doubt()
            raise

    async def _address(self) -> Address:
        if (address := self._route.address) is not None and self._route.is_certain:
            return address
        return await self._route.find()

    async def _send_asked(
        self, there: Address, commands: Sequence[Command], before: Sequence[Command]
    ) -> list[Any]:
        """Behind ASKING, which is good for one command or one transaction."""
        is_atomic = commands[0][0] == "MULTI"
        behind = [commands] if is_atomic else [[each] for each in commands]
        sent = [*before, *(each for group in behind for each in (("ASKING",), *group))]
        replies = await self._send(there, sent)
        raise_refusal(replies[: len(before)])
        rest = replies[len(before) :]
        return rest[1:] if is_atomic else rest[1::2]

    async def _send(self, address: Address, commands: Sequence[Command]) -> list[Any]:
        connection = self._taken(address)
        self._busy[connection] = address
        try:
            replies = await self._exchange(connection, commands)
        except BaseException as error:
            # Replies may be under way: nobody must read them as answers to another question.
            await connection.disconnect(nowait=True)
            if isinstance(error, (redis_errors.ConnectionError, OSError)):
                await self._drop_free()
            raise
        finally:
            del self._busy[connection]
        if self._is_closed:
            await connection.disconnect(nowait=True)
        else:
            self._free.append((address, connection))
        return replies

    def _taken(self, address: Address) -> AbstractConnection:
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index][0] == address:
                return self._free.pop(index)[1]
        place: dict[str, Any] = {"host": address.host, "port": address.port} if address.host else {}
        return self._class(**self._options, **place)

    async def _exchange(
        self, connection: AbstractConnection, commands: Sequence[Command]
    ) -> list[Any]:
        if not connection.is_connected:
            await connection.connect()  # type: ignore[no-untyped-call]
            if self._route.servers.asks_role:
                await _require_primary(connection)
        # Its stub knows of commands with one word only.
        packed = b"".join([pack_command(tuple(each)) for each in commands])  # type: ignore[arg-type]
        await connection.send_packed_command(packed, check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(await connection.read_response())
            except redis_errors.ResponseError as error:
                replies.append(error)
        if self._route.servers.is_redundant:
            for reply in replies:
                if isinstance(reply, redis_errors.ReadOnlyError):
                    # A replica by now: nobody may read here either.
                    raise NotPrimary(str(reply))
        return replies

    def _leave_others(self, address: Address) -> None:
        """Who waits at a server that is not the primary any more waits in vain."""
        stale = [one for one, where in self._busy.items() if where != address]
        stale += [one for where, one in self._free if where != address]
        self._free = [(where, one) for where, one in self._free if where == address]
        for connection in stale:
            task = asyncio.create_task(connection.disconnect(nowait=True))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _drop_free(self) -> None:
        # One broken socket usually means a restarted server: the idle ones are dead too.
        stale, self._free = self._free, []
        for _, connection in stale:
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        self._is_closed = True
        await self._drop_free()
        await asyncio.gather(*self._leaving, return_exceptions=True)


async def _require_primary(connection: AbstractConnection) -> None:
    await connection.send_command("ROLE")
    role = await connection.read_response()
    if role[0] != b"master":
        raise NotPrimary(f"the server that the Sentinels named is a {role[0].decode()}")


def _redirect(replies: Sequence[Any]) -> redis_errors.AskError | None:
    """MOVED is one, too."""
    return next((each for each in replies if isinstance(each, redis_errors.AskError)), None)
