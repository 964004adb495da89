"""Parts that look well and are not: health says so, with the reason, and says when it is over.

Every process lives and answers as far as it can; what they cannot is to get on. And a cell that is
only full is well. How long it takes is settings, which are short here: a leader's silence, a
worker's, a step's.
"""

import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import httpx
import redis

from kaiten.local.health import state_of
from kaiten.mini import CHECKPOINT
from service_kit.grpc_health import LIVE
from tests.support.answers import until
from tests.support.cluster import Cluster
from tests.support.processes import GATEWAY, ServiceProcess

SLOTS = 4
SCHEDULER_FLAGS = {"worker_timeout_ms": 1000}
GATEWAY_FLAGS = {"model": CHECKPOINT, "leader_quiet_s_max": 2.0, "stalled_ms_max": 1500}


class Watched:
    """A cell with one worker and a gateway, and what they say of themselves."""

    def __init__(self, cluster: Cluster, http: httpx.AsyncClient, worker_address: str) -> None:
        self.cluster, self._http, self.worker_address = cluster, http, worker_address

    async def problem(self) -> str:
        """Why the gateway is not ready; empty: it is."""
        reply = await self._http.get("/ready")
        reason = reply.json().get("reason", "")
        assert (reply.status_code == 200) == (not reason)
        return str(reason)

    async def says(self, *words: str) -> None:
        """Until the gateway says one of these; none: that it is ready. It lives meanwhile."""

        async def is_so() -> bool:
            problem = await self.problem()
            return any(word in problem for word in words) if words else not problem

        try:
            await until(is_so, f"a gateway that says {words}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it says {await self.problem()!r}") from error
        assert (await self._http.get("/health")).status_code == 200

    async def completes(self) -> httpx.Response:
        asked = {"model": CHECKPOINT.resolve().name, "prompt": "x", "max_tokens": 2}
        return await self._http.post("/v1/completions", json=asked)

    async def worker_is(self, state: str) -> None:
        await says(self.worker_address, state)

    async def computes(self) -> None:
        """Until somebody sits in the worker's batch."""

        async def is_so() -> bool:
            state = await self.cluster.state()
            return state is not None and state.running > 0

        await until(is_so, "a batch")


async def is_live(address: str) -> bool:
    return await state_of(address, LIVE) == "serving"


async def says(address: str, state: str) -> None:
    """Until a part says so of itself."""

    async def is_so() -> bool:
        return (await state_of(address)).startswith(state)

    await until(is_so, f"{address} that is {state}")


@asynccontextmanager
async def watched(folder: Path) -> AsyncIterator[Watched]:
    cluster = Cluster(folder, workers=0, scheduler_flags=SCHEDULER_FLAGS)
    worker, door, http_port = (cluster.hold_port() for _ in range(3))
    flags = {"grpc_port": worker.number, "hung_s": 1.0, "slots": SLOTS, "gates": cluster.gates()}
    # Whoever waits for a slot waits for longer than a step may take.
    flags["step_ms"] = 20
    cluster.add_worker(flags)
    async with cluster:
        base = {"redis_url": cluster.store.url, "grpc_port": door.number}
        ports = {**base, "http_port": http_port.number}
        cluster.add("gateway", GATEWAY, {**ports, **GATEWAY_FLAGS}).start()
        async with httpx.AsyncClient(base_url=f"http://{http_port.address}", timeout=60) as http:

            async def is_up() -> bool:
                return (await state_of(door.address)).startswith(("serving", "not serving"))

            await until(is_up, "the gateway")
            found = Watched(cluster, http, worker.address)
            await found.says()
            yield found


@contextmanager
def stopped(process: ServiceProcess) -> Iterator[None]:
    """It lives, and does nothing."""
    process.send(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send(signal.SIGCONT)


@contextmanager
def configured(url: str, name: str, value: str, after: str) -> Iterator[None]:
    """A store with a setting that somebody has changed."""
    with redis.Redis.from_url(url) as store:
        store.config_set(name, value)
        try:
            yield
        finally:
            store.config_set(name, after)


@contextmanager
def locked(url: str) -> Iterator[None]:
    """A store whose password was changed before its users knew."""
    with redis.Redis.from_url(url) as store:
        store.config_set("requirepass", "new")
        store.client_kill_filter(_type="normal", skipme=True)
        try:
            yield
        finally:
            store.execute_command("AUTH", "new")
            store.config_set("requirepass", "")


Lie = Callable[[], AbstractContextManager[None]]


async def test_who_lives_and_cannot_get_on_is_told_from_who_can(tmp_path: Path) -> None:
    """One after the other, with the reason that is given for each; then all is well again."""
    async with watched(tmp_path) as cell:
        cluster, url = cell.cluster, cell.cluster.store.url
        (scheduler,) = cluster.scheduler_addresses
        lies: dict[str, tuple[Lie, tuple[str, ...]]] = {
            "a worker that is stopped": (
                partial(stopped, cluster.workers[0]),
                ("no worker is ready: it does not answer", "no worker is ready: none is"),
            ),
            "a leader that is stopped": (
                partial(stopped, cluster.schedulers[0]),
                ("no scheduler leads",),
            ),
            "a store that is stopped": (cluster.store.paused, ("the store does not answer",)),
            "a store that is full": (
                partial(configured, url, "maxmemory", "1", "0"),
                ("the store is full",),
            ),
            "a store whose password is another": (
                partial(locked, url),
                ("must accept the url's user and password",),
            ),
            "a store that takes nothing without a replica": (
                partial(configured, url, "min-replicas-to-write", "1", "0"),
                ("no scheduler leads", "the store"),
            ),
        }
        for lie, (begun, words) in lies.items():
            with begun():
                await cell.says(*words)
                if begun == cluster.store.paused:
                    await says(scheduler, "not serving: unavailable: the ledger cannot be reached")
            try:
                await cell.says()
                await says(scheduler, "serving")
                await cluster.ready(workers=1)
            except AssertionError as error:
                raise AssertionError(f"after {lie}: {error}") from error
        await cluster.connect()


async def test_a_step_that_does_not_end_is_told_from_many_that_wait(tmp_path: Path) -> None:
    async with watched(tmp_path) as cell:
        cluster = cell.cluster
        # Before the first step has come back nobody knows how long one takes.
        await (await cluster.submit()).done()
        with cluster.held():
            await cluster.submit_many(SLOTS, max_tokens=8)
            await cell.worker_is("not serving: a step has not ended for ")
            lives = await state_of(cell.worker_address, LIVE)
            assert lives.startswith("not serving: a step has not ended for ")
            await cell.says("no worker is ready: a step of it does not end", "is overdue")
        await cell.worker_is("serving")
        await until(partial(is_live, cell.worker_address), "a worker that lives")
        await cell.says()
        await cluster.all_done()
        # Sixteen times as many as there are slots: whoever comes waits, for longer than anybody
        # looks, and all is well.
        began_s = time.monotonic()
        crowd = await cluster.submit_many(16 * SLOTS, max_tokens=900)

        async def is_well_though_they_wait() -> bool:
            """For longer than a step may take. Who was put aside for a moment is asked again."""
            is_late = time.monotonic() - began_s > 1.5
            is_well = await state_of(cell.worker_address) == "serving" and not await cell.problem()
            state = await cluster.state()
            assert state is None or state.waiting, "it was never well"
            return is_late and is_well and state is not None

        await until(is_well_though_they_wait, "a full cell that is well")
        for answer in crowd:
            await cluster.ledger.cancel(answer.record.id)
        await cluster.all_done()
        await until(cluster.is_idle, "nobody left of them is in a step")
        # The last one leaves: it ends what it has, and nobody else is there for who comes.
        with cluster.held():
            await cluster.submit()
            await cell.computes()
            cluster.workers[0].send(signal.SIGTERM)
            await cell.worker_is("not serving: it is draining")
            await cell.says("no worker is ready: it is draining")
        assert cluster.workers[0].join() == 0
        await cell.says("no worker is ready: none is registered")
        # If this process was put aside until its step was given up, it had nothing more to end.
        cluster.workers[0].start()
        await cluster.all_done()


async def test_a_store_that_has_lost_a_rule_takes_nothing_in_until_it_is_mended(
    tmp_path: Path,
) -> None:
    """What was taken in then might be lost, whoever was told that it was accepted."""
    async with watched(tmp_path) as cell:
        with configured(cell.cluster.store.url, "appendonly", "no", "yes"):
            await cell.says("appendonly must be yes")
            refused = await cell.completes()
            assert refused.status_code == 503
            assert "appendonly must be yes" in refused.text
        await cell.says()
        assert (await cell.completes()).status_code == 200
