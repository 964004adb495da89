"""Several real Valkeys: a cluster of three shards with a replica each, or three with Sentinels.

Both are made by the commands an operator would give, over sockets: no valkey-cli is needed.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from redis import Redis
from redis.crc import key_slot
from redis.exceptions import RedisError

from kaiten.local.ports import HeldPort
from tests.support.store_server import StoreServer

WAIT_S: Final = 60.0
SHARDS: Final = 3
SLOTS: Final = 16384
# Long enough for a machine that does something else, too: no primary is lost that was not hurt.
NODE_TIMEOUT_MS: Final = 1500
DOWN_AFTER_MS: Final = 1500
SENTINELS: Final = 3
PRIMARY_NAME: Final = "ledger"


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Servers tell nobody what they have come to know of each other."""
    give_up_at = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(RedisError, OSError):
            if is_so():
                return
        assert time.monotonic() < give_up_at, f"no {what} after {WAIT_S} s"
        time.sleep(0.02)


class Group:
    """What both have."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.servers: list[StoreServer] = []
        self._admins: dict[int, Redis] = {}
        self._held: list[HeldPort] = []

    def admin(self, server: StoreServer) -> Any:
        """A client of that one server. What it answers has no types."""
        if server.port not in self._admins:
            credentials = server.settings.get("masterauth")
            self._admins[server.port] = Redis(
                port=server.port, password=credentials, socket_timeout=5, **self._client_options()
            )
        return self._admins[server.port]

    def _client_options(self) -> dict[str, Any]:
        return {}

    def of(self, port: int) -> StoreServer:
        return next(each for each in self.servers if each.port == port)

    def role(self, server: StoreServer) -> str:
        found: Any = self.admin(server).execute_command("ROLE")
        return str(found[0].decode())

    def replication(self, server: StoreServer) -> dict[str, Any]:
        found: Any = self.admin(server).info("replication")
        return dict(found)

    def _await_link(self, replica: StoreServer) -> None:
        wait_until(
            lambda: self.replication(replica).get("master_link_status") == "up",
            f"replica at {replica.port}",
        )

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def primary(self) -> StoreServer:
        raise NotImplementedError

    def shard(self) -> list[StoreServer]:
        """Who has the cell's keys, primary first."""
        raise NotImplementedError

    def promoted(self, old: StoreServer) -> StoreServer:
        """Who came after the one that was hurt; waits for it."""
        raise NotImplementedError

    def cut_off(self, primary: StoreServer, replica: StoreServer) -> None:
        """Frozen, and what it is sent from now on does not lie in its socket until it is back."""
        replica.freeze()
        self.admin(primary).execute_command("CLIENT", "KILL", "TYPE", "replica")

    def heal(self) -> None:
        """Everybody is up, replicas follow, and there is nothing in it."""
        for server in self.servers:
            if server.is_running:
                server.thaw()
            else:
                server.start()
        wait_until(self._is_well, "group that is well")
        for server in self.servers:
            if self.role(server) == "master":
                self.admin(server).flushall()

    def _is_well(self) -> bool:
        roles = [self.role(each) for each in self.servers]
        links = [
            self.replication(each).get("master_link_status") == "up"
            for each, role in zip(self.servers, roles, strict=True)
            if role != "master"
        ]
        return all(links) and self._has_primaries(roles.count("master"))

    def _has_primaries(self, count: int) -> bool:
        return count == 1

    def close(self) -> None:
        for client in self._admins.values():
            client.close()
        for server in self.servers:
            server.close()
        for port in self._held:
            port.close()

    def start(self) -> Self:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreCluster(Group):
    """Three primaries with a replica each. `slot_of` is where a cell's keys are."""

    def __init__(self, folder: Path, *, cell: str = "0", **settings: str) -> None:
        super().__init__(folder)
        self.slot = key_slot(f"{{{cell}}}".encode())
        self.tls = "tls-port" in settings
        for index in range(2 * SHARDS):
            bus = HeldPort()
            self._held.append(bus)
            server = StoreServer(
                folder / f"node-{index}",
                cluster_enabled="yes",
                cluster_config_file="nodes.conf",
                cluster_port=str(bus.number),
                cluster_node_timeout=str(NODE_TIMEOUT_MS),
                # However old a replica's data are, it may be promoted: the worst that can happen.
                cluster_replica_validity_factor="0",
                **settings,
            )
            self.servers.append(server)

    @property
    def url(self) -> str:
        # Not the one with the slot: that is to be found out.
        return f"redis+cluster://127.0.0.1:{self.servers[0].port},127.0.0.1:{self.servers[-1].port}"

    def start(self) -> Self:
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait()
        self._form()
        return self

    def _form(self) -> None:
        ids = {}
        for index, server in enumerate(self.servers):
            admin = self.admin(server)
            ids[server.port] = self._id(server)
            admin.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            if index < SHARDS:
                first, last = SLOTS * index // SHARDS, SLOTS * (index + 1) // SHARDS - 1
                admin.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
        first_server = self.admin(self.servers[0])
        for server in self.servers[1:]:
            bus = server.settings["cluster_port"]
            first_server.execute_command("CLUSTER", "MEET", "127.0.0.1", server.port, bus)
        for server in self.servers:
            self._await_info(server, "cluster_known_nodes", str(2 * SHARDS))
        for primary, replica in zip(self.servers[:SHARDS], self.servers[SHARDS:], strict=True):
            self.admin(replica).execute_command("CLUSTER", "REPLICATE", ids[primary.port])
        for server in self.servers:
            self._await_info(server, "cluster_state", "ok")
        for replica in self.servers[SHARDS:]:
            self._await_link(replica)
        # A failover needs others who know both.
        for server in self.servers:
            wait_until(partial(self._has_replicas, server), "replicas of every shard")

    def _has_replicas(self, server: StoreServer) -> bool:
        return all(len(each) == 4 for each in self._slots(server))

    def _await_info(self, server: StoreServer, name: str, value: str) -> None:
        wait_until(lambda: self._info(server)[name] == value, f"{name} {value} at {server.port}")

    def _info(self, server: StoreServer) -> dict[str, str]:
        text: Any = self.admin(server).execute_command("CLUSTER", "INFO")
        if isinstance(text, dict):
            return {name: str(value) for name, value in text.items()}
        return dict(line.split(":", 1) for line in text.decode().split("\r\n") if line)

    def _slots(self, server: StoreServer) -> list[list[Any]]:
        client = self.admin(server)
        client.response_callbacks.pop("CLUSTER SLOTS", None)
        return client.execute_command("CLUSTER SLOTS")  # type: ignore[no-any-return]

    def shard(self, among: StoreServer | None = None) -> list[StoreServer]:
        """Of the cell's slot, primary first, as some server that lives sees it."""
        for server in [among] if among else self.servers:
            if not server.is_running:
                continue
            with contextlib.suppress(RedisError, OSError):
                for first, last, *nodes in self._slots(server):
                    if first <= self.slot <= last:
                        return [self.of(int(node[1])) for node in nodes]
        raise AssertionError("nobody has the slot")

    @property
    def primary(self) -> StoreServer:
        return self.shard()[0]

    def other_primaries(self) -> list[StoreServer]:
        mine = self.shard()
        return [each for each in self.servers if each not in mine and self.role(each) == "master"]

    def _has_primaries(self, count: int) -> bool:
        """Each with its replica, and all of one mind about the cell's slot."""
        shards = [self.shard(each) for each in self.servers]
        states = [self._info(each)["cluster_state"] == "ok" for each in self.servers]
        return (
            all(states)
            and count == SHARDS
            and all(len(each) == 2 and each == shards[0] for each in shards)
            and all(len(each) == 4 for each in self._slots(self.servers[0]))
        )

    def fail_over(self) -> None:
        """As an operator does it before a restart: the replica takes over and loses nothing."""
        old, replica = self.shard()
        self.admin(replica).execute_command("CLUSTER", "FAILOVER")
        wait_until(lambda: all(self.shard(each)[0] is replica for each in self.servers), "swap")
        self._await_link(old)

    @contextlib.contextmanager
    def moving(self, to: StoreServer) -> Iterator[Callable[[list[str]], None]]:
        """The slot is on its way; afterwards all of it has gone. Gives what moves some keys."""
        source = self.primary
        here, there = self.admin(source), self.admin(to)
        ids = {each: self._id(each) for each in (source, to)}
        there.execute_command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", ids[source])
        here.execute_command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", ids[to])

        def move(keys: list[Any]) -> None:
            here.execute_command(
                "MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "REPLACE", "KEYS", *keys
            )

        yield move
        while keys := here.execute_command("CLUSTER", "GETKEYSINSLOT", self.slot, 10):
            move(keys)
        primaries = [each for each in self.other_primaries() if each is not to]
        for server in (to, source, *primaries):
            self.admin(server).execute_command("CLUSTER", "SETSLOT", self.slot, "NODE", ids[to])

    def move_slot(self, to: StoreServer) -> None:
        """As `valkey-cli --cluster reshard` does it, key by key."""
        with self.moving(to):
            pass

    def _id(self, server: StoreServer) -> str:
        return str(self.admin(server).execute_command("CLUSTER", "MYID").decode())

    def move_slot_at_once(self, to: StoreServer) -> None:
        """As Valkey 9 does it by itself: what is written meanwhile follows, then the slot goes."""
        source = self.primary
        self.admin(source).execute_command(
            "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", self.slot, self.slot, "NODE", self._id(to)
        )
        wait_until(lambda: self.shard(to)[0] is to, "slot at its new place")

    def promoted(self, old: StoreServer) -> StoreServer:
        others = [each for each in self.servers if each is not old and each.is_running]
        wait_until(lambda: self.shard(others[0])[0] is not old, "other primary")
        return self.shard(others[0])[0]


class SentinelGroup(Group):
    """A primary with two replicas, and three Sentinels that choose the next."""

    def __init__(self, folder: Path, *, replicas: int = 2, **settings: str) -> None:
        super().__init__(folder)
        self.servers = [
            StoreServer(folder / f"store-{index}", **settings) for index in range(1 + replicas)
        ]
        self.sentinels: list[StoreServer] = []

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{each.port}" for each in self.sentinels)
        return f"redis+sentinel://{places}/{PRIMARY_NAME}"

    def start(self) -> Self:
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait()
        for replica in self.servers[1:]:
            self.admin(replica).execute_command("REPLICAOF", "127.0.0.1", self.servers[0].port)
        for replica in self.servers[1:]:
            self._await_link(replica)
        for index in range(SENTINELS):
            self.sentinels.append(self._sentinel(self.folder / f"sentinel-{index}"))
        for sentinel in self.sentinels:
            wait_until(partial(self._knows_all, sentinel), "Sentinels of a mind")
        return self

    def _sentinel(self, folder: Path) -> StoreServer:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "sentinel.conf"
        lines = (
            f"sentinel monitor {PRIMARY_NAME} 127.0.0.1 {self.servers[0].port} 2",
            f"sentinel down-after-milliseconds {PRIMARY_NAME} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {PRIMARY_NAME} 5000",
        )
        config.write_text("\n".join(lines) + "\n")
        return StoreServer(folder, program=(str(config), "--sentinel")).start()

    def _knows_all(self, sentinel: StoreServer) -> bool:
        found: Any = self.admin(sentinel).execute_command("SENTINEL", "MASTER", PRIMARY_NAME)
        facts = {name.decode(): value for name, value in found.items()}
        return (int(facts["num-other-sentinels"]), int(facts["num-slaves"])) == (
            SENTINELS - 1,
            len(self.servers) - 1,
        )

    @property
    def primary(self) -> StoreServer:
        (_, port) = self.admin(self.sentinels[0]).execute_command(
            "SENTINEL", "GET-MASTER-ADDR-BY-NAME", PRIMARY_NAME
        )
        return self.of(int(port))

    def shard(self) -> list[StoreServer]:
        primary = self.primary
        return [primary, *(each for each in self.servers if each is not primary)]

    def promoted(self, old: StoreServer) -> StoreServer:
        wait_until(lambda: self.primary is not old, "other primary")
        return self.primary

    def close(self) -> None:
        for sentinel in self.sentinels:
            sentinel.close()
        super().close()
