"""The scheduler process: stand by, lead, drain."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import structlog

from kaiten.v1.scheduler_service_pb2_grpc import add_SchedulerServiceServicer_to_server
from ledger import Leader, Ledger, LedgerLimits, first_address
from scheduler_svc import archiving
from scheduler_svc.leader_session import LeaderSession
from scheduler_svc.meters import Meters
from scheduler_svc.servicer import Servicer
from scheduler_svc.settings import SchedulerSettings
from scheduler_svc.standby import Standby
from scheduler_svc.tracing import Tracing
from service_kit import grpc_server, lifecycle, logs, settings, telemetry
from service_kit.clock import SystemClock
from service_kit.errors import ConfigError, OutOfOrder, Unavailable
from service_kit.metrics import Metrics, close_all, count_spans, tell_expiries
from service_kit.outages import Outage
from service_kit.peers import Peers, make_credential

log = structlog.get_logger()

STORE_RETRY_S = 0.5
# For a store that does not answer; the lease then runs out by itself.
RESIGN_S_MAX = 1.0
SERVICE = "kaiten.v1.SchedulerService"
DRAINING = "it is draining"


class SchedulerProcess:
    """start → serve → drain → stop; see service_kit.lifecycle."""

    def __init__(self, chosen: SchedulerSettings) -> None:
        self.drain_s = chosen.drain_s
        self._settings = chosen
        self._clock = SystemClock()
        archiving.check(chosen)
        if chosen.peer_credential_create and chosen.peer_credential_file is not None:
            make_credential(chosen.peer_credential_file)
        self._peers = Peers.of(chosen)
        self._servicer = Servicer(chosen)
        self._ledger: Ledger | None = None
        self._has_connected = False
        # By a worker that refused us: the next leadership is above it.
        self._seen_epoch = 0
        self._is_draining = False
        self._metrics = Metrics("scheduler", is_scraped=chosen.metrics_port is not None)
        self._meters = Meters(
            self._metrics.meter,
            with_tenants=chosen.metrics_tenants,
            has_exemplars=self._metrics.has_exemplars,
        )
        # None when nobody listens: then nothing is even collected.
        self._spans = telemetry.configure("scheduler")
        count_spans(self._metrics.meter, self._spans)
        tell_expiries(self._metrics.meter, self._peers.expiries)

    async def start(self) -> dict[str, object]:
        log.info("service.settings", **settings.describe(self._settings))
        self._server = grpc_server.create_server(interceptors=self._peers.interceptors())
        add_SchedulerServiceServicer_to_server(self._servicer, self._server)
        self._health = grpc_server.add_health(self._server, [SERVICE])
        grpc_server.add_reflection(self._server, [SERVICE])
        self._bound = await self._peers.bind(self._server, self._settings)
        await self._server.start()
        page = self._metrics.serve(self._settings.metrics_host, self._settings.metrics_port)
        await self._connect()
        return {
            "grpc": str(self._bound),
            "metrics": page,
            "cell": self._settings.cell,
            "policy": self._settings.policy,
        }

    async def serve(self) -> None:
        while not self._is_draining:
            reason = None
            try:
                await self._lead()
            except* (OutOfOrder, Unavailable) as group:
                reason = "; ".join(str(error) for error in group.exceptions)
            if reason is not None and not self._is_draining:
                log.warning("leadership.ended", reason=reason)
                await self._clock.sleep(STORE_RETRY_S)
                await self._connect()

    async def drain(self) -> None:
        self._is_draining = True
        self._health.set_all(DRAINING)
        if self._servicer.session is not None:
            await self._servicer.session.drain()

    async def stop(self) -> None:
        self._health.set_all("it is stopping")
        await self._server.stop(grace=0.5)
        if self._ledger is not None:
            await self._ledger.close()
        await close_all(self._metrics, self._spans)

    async def _connect(self) -> None:
        """A ledger that can be trusted. Waits for the store; one that is misconfigured is refused
        at the start, and waited for later.
        """
        outage = Outage("store.waiting", over="store.answers")
        while True:
            if self._ledger is not None:
                await self._ledger.close()
            limits = LedgerLimits(
                result_ttl_s=self._settings.result_ttl_s,
                response_ttl_s=self._settings.response_ttl_s,
                allow_everysec=self._settings.allow_everysec,
                replicas_min=self._settings.store_replicas_min,
                replicas_ack=self._settings.store_replicas_ack,
            )
            self._ledger = await Ledger.connect(
                self._settings.redis_url.get_secret_value(), cell=self._settings.cell, limits=limits
            )
            try:
                store = await self._ledger.check()
            except (ConfigError, Unavailable) as error:
                if isinstance(error, ConfigError) and not self._has_connected:
                    raise
                self._note_store_problem(str(error))
                outage.failed(self._clock.monotonic_ns(), reason=str(error))
                await self._clock.sleep(STORE_RETRY_S)
                continue
            outage.ended(self._clock.monotonic_ns())
            log.info(
                "store.ready",
                server=store.server,
                version=store.version,
                kind=store.kind,
                replicas=store.replicas,
            )
            self._has_connected = True
            return

    async def _lead(self) -> None:
        assert self._ledger is not None
        self._note_store_problem("")
        standby = Standby(
            self._ledger,
            self._clock,
            self._servicer,
            ttl_s=self._settings.lease_ttl_s,
            above_epoch=self._seen_epoch,
            address=await self._address(),
            peers=self._peers,
            on_store_problem=self._note_store_problem,
        )
        leader = await standby.campaign()
        archive = None
        try:
            self._servicer.begin(leader)
            archive = archiving.begin(self._settings, leader, await self._ledger.store_id())
            await self._lead_as(self._session(leader, archive))
        finally:
            self._servicer.end()
            self._meters.leads(None)
            await self._resign(leader)
            if archive is not None:
                await asyncio.to_thread(archive.close)

    async def _lead_as(self, session: LeaderSession) -> None:
        session.renewal.on_store_problem = self._note_store_problem
        self._meters.leads(session)
        self._metrics.model_name = lambda: session.roster.model
        try:
            await session.recover()
            # From here on workers may register; `run` makes room for them before it first waits.
            self._servicer.session = session
            await session.run()
        finally:
            self._seen_epoch = max(self._seen_epoch, session.seen_epoch)

    def _session(self, leader: Leader, archive: archiving.Archive | None) -> LeaderSession:
        assert self._ledger is not None
        return LeaderSession(
            ledger=self._ledger,
            leader=leader,
            settings=self._settings,
            clock=self._clock,
            peers=self._peers,
            meters=self._meters,
            tracing=self._tracing(),
            archive=archive,
            standby_addresses=self._servicer.standby_addresses.values(),
        )

    def _note_store_problem(self, problem: str) -> None:
        """Why the store does not answer, as it was last; empty: it does, and so do we."""
        self._health.set_all(DRAINING if self._is_draining else problem)

    async def _resign(self, leader: Leader) -> None:
        """However a leadership ended, a standby may lead at once. Nothing of it runs any more."""
        assert self._ledger is not None
        with suppress(TimeoutError, Unavailable):
            async with asyncio.timeout(RESIGN_S_MAX):
                await self._ledger.resign(leader)

    def _tracing(self) -> Tracing | None:
        if self._spans is None:
            return None
        return Tracing(self._spans, policy=self._settings.policy)

    async def _address(self) -> str:
        """Where workers find this scheduler once it leads; the lease carries it."""
        chosen = self._settings
        store = first_address(chosen.redis_url.get_secret_value())
        return chosen.advertise_address or await self._bound.advertised(store)


def main(argv: Sequence[str] | None = None) -> int:
    """Console entry: `kaiten scheduler`."""

    def build() -> SchedulerProcess:
        chosen = settings.load(SchedulerSettings, "scheduler", argv)
        logs.configure("scheduler", chosen.log_level)
        return SchedulerProcess(chosen)

    return lifecycle.launch(build)
