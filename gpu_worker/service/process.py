"""The worker as a process: start, serve, drain, stop. What it computes with comes from `load`."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import grpc
import structlog

from gpu_worker.batch.plans import Description, LayerGroup
from gpu_worker.batch.rows import Rows
from gpu_worker.runner.engine import Engine
from gpu_worker.service import runtime
from gpu_worker.service.device_memory import device_memory
from gpu_worker.service.loading import Loaded
from gpu_worker.service.metrics import Meters
from gpu_worker.service.registration import Registrar
from gpu_worker.service.server import SERVICE_NAME, WorkerServicer
from gpu_worker.settings import WorkerSettings
from kaiten.v1 import worker_service_pb2_grpc
from service_kit import telemetry
from service_kit.grpc_health import REGISTERED, HealthStatus
from service_kit.grpc_server import (
    MIB,
    ServerLimits,
    add_health,
    add_reflection,
    create_server,
)
from service_kit.metrics import Metrics, close_all, count_spans, tell_expiries
from service_kit.peers import Peers

log = structlog.get_logger()

# A plan can carry a whole batch of long prompts; the leader's stream lives as long as it leads.
_SERVER_LIMITS: Final = ServerLimits(message_in_bytes_max=64 * MIB, connection_age_s_max=None)
_STOP_GRACE_S: Final = 1.0
# Of its health, between two looks at whether steps end.
_LOOK_S_MAX: Final = 1.0


class WorkerProcess:
    def __init__(self, settings: WorkerSettings, load: Callable[[WorkerSettings], Loaded]) -> None:
        self._settings = settings
        self._load = load
        self._metrics = Metrics("worker", is_scraped=settings.metrics_port is not None)
        self._spans = telemetry.configure("worker")
        count_spans(self._metrics.meter, self._spans)
        self._engine: Engine | None = None
        self._server: grpc.aio.Server | None = None
        self._servicer: WorkerServicer | None = None
        self._registrar: Registrar | None = None
        self._health: HealthStatus | None = None
        self._crashed: asyncio.Future[None] | None = None
        # Why it takes no work for good; a step that does not end may yet.
        self._leaves_because = ""

    @property
    def drain_s(self) -> float:
        return self._settings.drain_s

    async def start(self) -> Mapping[str, object]:
        settings = self._settings
        peers = Peers.of(settings)
        tell_expiries(self._metrics.meter, peers.expiries)
        server = self._server = create_server(
            limits=_SERVER_LIMITS, interceptors=peers.interceptors()
        )
        # Bound before loading: a taken port is known at once, and a page for Prometheus is there.
        bound = await peers.bind(server, settings)
        page = self._metrics.serve(settings.metrics_host, settings.metrics_port)
        self._crashed = asyncio.get_running_loop().create_future()
        loaded = await asyncio.to_thread(self._load, settings)
        runtime.return_freed_memory()
        description = describe(loaded)
        self._engine = Engine(
            Rows(loaded.limits, loaded.grammars), loaded.runner, on_crash=self._crash_hook()
        )
        await asyncio.wrap_future(self._engine.start(loaded.warm_up_thread))
        meters = Meters(self._metrics.meter)
        self._servicer = WorkerServicer(
            self._engine,
            description,
            meters,
            self._spans,
            gather_s=settings.gather_ms / 1000,
            device=loaded.device,
        )
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, server)
        asked = {REGISTERED: self._why_unknown}
        self._health = add_health(server, (SERVICE_NAME,), why_stuck=self._why_stuck, asked=asked)
        add_reflection(server, (SERVICE_NAME,))
        await server.start()
        self._health.set_all("")

        async def address_for(scheduler: str) -> str:
            return settings.advertise_address or await bound.advertised(scheduler)

        self._registrar = Registrar(
            settings.scheduler, address_for=address_for, description=description, peers=peers
        )
        self._servicer.on_stream_end = self._registrar.ask_now
        self._look_at(meters, self._engine, self._registrar, loaded)
        address = settings.advertise_address or str(bound)
        return {**_ready_fields(loaded, description, address), "metrics": page}

    async def serve(self) -> None:
        """Until cancelled, or until the compute thread dies."""
        assert self._registrar is not None
        assert self._crashed is not None
        registering = asyncio.create_task(self._registrar.run(), name="register")
        looking = asyncio.create_task(self._watch_steps(), name="steps")
        try:
            await asyncio.wait((registering, self._crashed), return_when=asyncio.FIRST_COMPLETED)
            if registering.done():
                registering.result()
            self._crashed.result()
        finally:
            registering.cancel()
            looking.cancel()
            await asyncio.gather(registering, looking, return_exceptions=True)

    def _why_stuck(self) -> str:
        """Why it does not get on; empty: its steps end."""
        assert self._engine is not None
        at_it_s = self._engine.at_it_ns / 1e9
        is_hung = at_it_s > self._settings.hung_s
        return f"a step has not ended for {at_it_s:.0f} s" if is_hung else ""

    def _why_unknown(self) -> str:
        """Why no leader gives it work; empty: one may."""
        is_known = self._registrar is not None and self._registrar.is_registered
        unknown = "" if is_known else "no leader has taken it in; its log says why"
        return self._leaves_because or self._why_stuck() or unknown

    async def _watch_steps(self) -> None:
        """A worker whose compute thread hangs answers everybody, and is of no use to anybody."""
        assert self._engine is not None
        assert self._health is not None
        was_hung = False
        while True:
            await asyncio.sleep(min(_LOOK_S_MAX, self._settings.hung_s / 4))
            stuck = self._why_stuck()
            self._health.set_all(self._leaves_because or stuck)
            if (is_hung := bool(stuck)) is was_hung:
                continue
            was_hung = is_hung
            if is_hung:
                log.error("worker.hung", step_s=round(self._engine.at_it_ns / 1e9, 1))
            else:
                log.info("worker.goes_on")

    async def drain(self) -> None:
        """Keep computing until the scheduler has moved everything elsewhere."""
        self._leave("it is draining")
        if self._registrar is not None:
            await self._registrar.drain()

    async def stop(self) -> None:
        if self._servicer is not None:
            self._servicer.end_stream()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        await close_all(self._metrics, self._spans)

    def _look_at(
        self, meters: Meters, engine: Engine, registrar: Registrar, loaded: Loaded
    ) -> None:
        meters.gauge("commands_waiting", lambda: engine.waiting_count, "plans not yet begun")
        meters.gauge("mixed_tokens_max", lambda: loaded.mixed_tokens, "of a step with decodes")
        memory = partial(device_memory, loaded.device)
        meters.gauge("device_memory", memory, "of the device: used, and in all", "By", "state")
        meters.gauge("is_registered", lambda: int(registrar.is_registered), "known to a leader")

    def _leave(self, reason: str) -> None:
        """It serves no more, and why in words that anybody may read."""
        self._leaves_because = reason
        if self._health is not None:
            self._health.set_all(reason)

    def _crash_hook(self) -> Callable[[Exception], None]:
        loop = asyncio.get_running_loop()

        def crashed(error: Exception) -> None:
            loop.call_soon_threadsafe(self._on_crash, error)

        return crashed

    def _on_crash(self, error: Exception) -> None:
        assert self._crashed is not None
        self._leave("its compute thread failed; its log says how")
        if not self._crashed.done():
            self._crashed.set_exception(error)


def describe(loaded: Loaded) -> Description:
    """Of this process: the boot_id is new."""
    limits = loaded.limits
    return Description(
        boot_id=secrets.token_hex(8),
        model=loaded.model,
        fingerprint=loaded.fingerprint,
        architecture=loaded.architecture,
        dtype=loaded.dtype,
        kv_dtype=loaded.kv_dtype,
        device=loaded.device_name,
        vocab_size=limits.vocab_size,
        context_tokens_max=limits.context_tokens,
        layer_groups=tuple(
            LayerGroup(window_tokens=window, layer_count=count, blocks_max=blocks)
            for window, count, blocks in zip(
                limits.windows, loaded.layer_counts, loaded.pool.blocks_held, strict=True
            )
        ),
        block_size=limits.block_size,
        block_count=limits.block_count,
        slots_max=limits.slots,
        step_tokens_max=limits.step_tokens,
        mixed_tokens_max=loaded.mixed_tokens,
        weights_digest=loaded.weights_digest,
        tokenizer_digest=loaded.tokenizer_digest,
        reads_grammars=limits.reads_grammars,
        slot_tokens_max=limits.slot_tokens,
        host_block_count=limits.host_block_count,
    )


def _ready_fields(loaded: Loaded, description: Description, address: str) -> dict[str, object]:
    pool = loaded.pool
    return {
        "address": address,
        "boot_id": description.boot_id,
        "model": description.model,
        "architecture": description.architecture,
        "dtype": description.dtype,
        "device": description.device,
        "kv": f"{pool.block_count} blocks of {pool.block_size} tokens",
        "kv_of_a_context": [
            f"{group.blocks_max} blocks: {group.layer_count} layers, "
            + (f"window {group.window_tokens}" if group.window_tokens else "all of it")
            for group in description.layer_groups
        ],
        **({"kv_host": f"{pool.host_block_count} blocks"} if pool.host_block_count else {}),
        "kv_dtype": description.kv_dtype,
        "kv_mb": pool.block_count * pool.block_bytes // 1_000_000,
        "context_tokens": pool.context_tokens,
        "concurrency_max": round(pool.concurrency, 1),
        "slots": description.slots_max,
        "step_tokens": description.step_tokens_max,
        "mixed_tokens": description.mixed_tokens_max,
        "phases_ms": loaded.phases_ms,
    }
