"""The gateway process: start, serve, drain, stop."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import grpc
import structlog

from gateway import tenants
from gateway.app import create_api, create_app
from gateway.cell.explaining import Explainer
from gateway.cell.ledger_session import LedgerLink
from gateway.cell.operators import Operators
from gateway.cell.readiness import Readiness, ReadinessLimits
from gateway.children.grammar_process import GrammarProcess
from gateway.children.pool import ChildLimits
from gateway.grpc import inference, scaler
from gateway.grpc.operators import OperatorServicer
from gateway.http.connection import ConnectionLimits
from gateway.http.open_files import make_room
from gateway.http.server import HttpServer
from gateway.observe.metrics import Meters
from gateway.observe.request_log import RequestLog
from gateway.observe.tracing import Tracing
from gateway.openai.batches.driver import BatchDriver
from gateway.openai.conversations.keeper import ConversationKeeper
from gateway.openai.operation import Api
from gateway.requests.door import Door
from gateway.requests.generation_service import GenerationService
from gateway.requests.prompts import Prompter
from gateway.requests.validation import Limits
from gateway.settings import GatewaySettings
from gateway.tenants import Keyring, KeysFile
from gateway.text import model_card, model_files
from gateway.text.model_card import ModelCard
from gateway.text.template_process import TemplateProcess
from ledger import LedgerLimits, TenantBounds
from service_kit import logs, settings, telemetry
from service_kit.addresses import is_loopback
from service_kit.clock import SystemClock
from service_kit.grpc_server import (
    ServerLimits,
    add_health,
    add_reflection,
    bind,
    create_server,
)
from service_kit.lifecycle import endless, launch
from service_kit.metrics import Metrics, close_all, count_spans, seen, tell_expiries
from service_kit.peers import Peers, bind_socket
from service_kit.tls import ServerTls

log = structlog.get_logger()

# After readiness turned false, load balancers need a moment to look before streams are refused.
CLOSE_GRACE_S: Final = 1.0
# Of the drain time, kept for telling the streams that are left to go elsewhere.
FAREWELL_SHARE: Final = 0.1
# Fields of a gRPC message, twice as many as 4096 turns need: a microsecond each.
RECORDS_MAX: Final = 1 << 15


class GatewayService:
    """One gateway. Built without I/O except for reading the model's folder."""

    def __init__(self, config: GatewaySettings) -> None:
        self._config = config
        self.drain_s = config.drain_s
        self._peers = Peers.of(config)
        self._tls = ServerTls.of(config)
        self._card = _card(config)
        self.link = LedgerLink(
            config.redis_url.get_secret_value(), cell=config.cell, limits=_ledger_limits(config)
        )
        self._readiness = Readiness(
            self.link,
            self._card,
            clock=SystemClock(),
            limits=ReadinessLimits(
                leader_quiet_s_max=config.leader_quiet_s_max,
                stalled_ms_max=config.stalled_ms_max,
                accepts_without_workers=config.accept_without_workers > 0,
            ),
        )
        self._keys_file = _keys_file(config)
        self._keyring = _keyring(config) if self._keys_file is None else self._keys_file.keyring
        self._template = _template(self._card, config)
        self._grammars = GrammarProcess(self._card.tokenizer_path, self._card.vocab_size)
        self._metrics = Metrics("gateway", is_scraped=config.metrics)
        self._spans = telemetry.configure("gateway")
        count_spans(self._metrics.meter, self._spans)
        self.generation_service = GenerationService(
            link=self.link,
            card=self._card,
            prompter=Prompter(self._card, self._template),
            readiness=self._readiness,
            limits=_limits(config, self._card),
            meters=self._meters(),
            tracing=Tracing(self._spans, model=self._card.name),
            request_log=RequestLog(is_on=config.log_requests),
            grammars=self._grammars,
            explainer=Explainer(self.link, SystemClock(), self._peers),
            door=Door(self._readiness, config.streams_max, self._keyring.share),
            timeout_s=config.request_timeout_s or None,
        )
        self._operators = Operators(self.link, SystemClock(), self._peers)
        api = self._api()
        self._batches = BatchDriver(api, self._keyring)
        self._conversations = ConversationKeeper(api, self._keyring)
        api.on_batch = self._batches.kick
        self._http = HttpServer(
            create_app(api, self._http_keyring()),
            config.http_host,
            config.http_port,
            ConnectionLimits(
                headers_s_max=config.headers_s_max,
                body_s_max=config.body_s_max,
                connections_max=config.http_connections_max,
            ),
            None if self._tls is None else self._tls.http_context,
        )
        self._grpc: grpc.aio.Server | None = None
        self._releasing: asyncio.Task[None] | None = None
        self.grpc_port = 0
        self.http_port = 0

    def _api(self) -> Api:
        return create_api(
            self.generation_service,
            self.link,
            self._operators,
            self._config,
            self._metrics,
            self._keyring.share,
        )

    async def start(self) -> Mapping[str, object]:
        """Bind both ports and begin to answer; whether requests can be served, readiness tells."""
        make_room(self._config.http_connections_max + self._config.rpcs_max)
        self._grpc = create_server(
            limits=ServerLimits(
                message_in_bytes_max=self._config.message_bytes_max,
                metadata_bytes_max=self._config.metadata_bytes_max,
                connection_age_s_max=self._config.connection_age_s_max,
                rpcs_max=self._config.rpcs_max,
                handshake_ms_max=round(self._config.headers_s_max * 1000),
                records_max=RECORDS_MAX,
            )
        )
        inference.add_to(
            self._grpc, self.generation_service, self._keyring, batch_max=self._config.prompts_max
        )
        OperatorServicer(self._operators, self._keyring).add_to(self._grpc)
        names = [*inference.SERVICE_NAMES]
        if self._config.keda_scaler:
            names.append(scaler.SERVICE_NAME)
            scaler.add_to(self._grpc, self._readiness, SystemClock())
        health = add_health(self._grpc, inference.SERVICE_NAMES, self._config.watches_max)
        if self._config.reflection:
            names.append("grpc.health.v1.Health")
            add_reflection(self._grpc, names, self._config.watches_max)
        await self._bind(self._grpc)
        await self.link.open()
        if self._template is not None:
            await self._template.start()
        await self._grpc.start()
        await self._http.start()
        self._readiness.listen(health.set_all)
        return {
            "model": self._card.name,
            "grpc": f"{self._config.grpc_host}:{self.grpc_port}",
            "http": f"{'https' if self._tls else 'http'}://"
            f"{self._config.http_host}:{self.http_port}",
        }

    async def _bind(self, server: grpc.aio.Server) -> None:
        """Both ports, and the socket of whoever is of this user."""
        config = self._config
        credentials = None if self._tls is None else self._tls.grpc_credentials()
        self.grpc_port = bind(server, config.grpc_host, config.grpc_port, credentials=credentials)
        if config.grpc_socket is not None:
            await bind_socket(server, config.grpc_socket.absolute())
        self.http_port = self._http.bind()

    async def serve(self) -> None:
        # Cancels outlive the drain: what clients left behind must still be told to the ledger.
        self._releasing = asyncio.create_task(self.generation_service.releases.run())
        async with asyncio.TaskGroup() as tasks:
            loops = [self.link.run(), self._readiness.run()]
            loops += [self._batches.run(), self._conversations.run()]
            files = [each for each in (self._keys_file, self._tls) if each is not None]
            for loop in (*loops, *(each.follow(SystemClock()) for each in files)):
                tasks.create_task(endless(loop))
            tasks.create_task(self._http.serve())

    async def drain(self) -> None:
        """Readiness false, nothing new in; streams run on, and those left are sent elsewhere."""
        self._readiness.drain()
        try:
            async with asyncio.timeout(self.drain_s * (1 - FAREWELL_SHARE)):
                await self.generation_service.drained()
        except TimeoutError:
            self.generation_service.close()
            await self.generation_service.drained()

    async def stop(self) -> None:
        """Works after a start that failed half-way, too."""
        self._readiness.is_draining = True
        self.generation_service.close()
        if self._grpc is not None:
            await self._grpc.stop(CLOSE_GRACE_S)
        await self._http.stop()
        await self._deliver_releases()
        if self._template is not None:
            await self._template.close()
        await self._grammars.close()
        await self.link.close()
        await close_all(self._metrics, self._spans)

    def _http_keyring(self) -> Keyring:
        """Without keys, who may see everything depends on where this door is."""
        if not self._keyring.is_open:
            return self._keyring
        return Keyring(is_local=is_loopback(self._config.http_host))

    def _meters(self) -> Meters:
        meter = self._metrics.meter
        is_ready = seen(lambda: int(not self._readiness.problem))
        meter.create_observable_gauge("kaiten.gateway.is_ready", is_ready, "", "as /ready says")
        wrong_keys = seen(lambda: self._keyring.wrong_keys.count)
        what = "presented, and nobody's"
        meter.create_observable_counter("kaiten.gateway.wrong_keys", wrong_keys, "", what)
        of_ports = () if self._tls is None else (self._tls.expiries,)
        tell_expiries(meter, self._peers.expiries, *of_ports)
        self._metrics.model_name = lambda: self._card.name
        return Meters(
            meter,
            model=self._card.name,
            with_tenants=self._config.metrics_tenants,
            has_exemplars=self._metrics.has_exemplars,
        )

    async def _deliver_releases(self) -> None:
        if self._releasing is None:
            return
        try:
            async with asyncio.timeout(CLOSE_GRACE_S):
                await self.generation_service.releases.settled()
        except TimeoutError:
            log.warning("releases.undelivered", count=len(self.generation_service.releases))
        self._releasing.cancel()
        await asyncio.wait({self._releasing})


def _ledger_limits(config: GatewaySettings) -> LedgerLimits:
    return LedgerLimits(
        requests_max=config.requests_max,
        prompt_tokens_max=config.prompt_tokens_max,
        results_bytes_max=config.results_mb << 20,
        files_bytes_max=config.files_mb << 20,
        files_ttl_s=round(config.files_hours * 3600),
        allow_everysec=config.allow_everysec,
        replicas_min=config.store_replicas_min,
        replicas_ack=config.store_replicas_ack,
    )


def _card(config: GatewaySettings) -> model_card.ModelCard:
    return model_card.load(
        model_files.find(config.model),
        config.served_model_name or config.model.resolve().name,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
    )


def _limits(config: GatewaySettings, card: ModelCard) -> Limits:
    return Limits(
        vocab_size=card.vocab_size,
        context_tokens_max=card.context_tokens_max,
        worker_wait_s=config.accept_without_workers,
        choices_max=config.choices_max,
        stops_max=config.stops_max,
        stop_chars_max=config.stop_chars_max,
        logprobs_max=config.logprobs_max,
        prompt_values_max=config.prompt_values_max,
        text_bytes_max=config.text_bytes_max,
        body_values_max=config.body_values_max,
        roles=frozenset(config.chat_roles),
        template_options=frozenset(config.template_options),
    )


def _keys_file(config: GatewaySettings) -> KeysFile | None:
    if config.api_keys_file is None:
        log.warning("keys.none", tenant=tenants.DEFAULT.name, fix="--api-keys-file FILE")
        return None
    of_cell = TenantBounds(
        requests_max=config.requests_max,
        prompt_tokens_max=config.prompt_tokens_max,
        results_bytes_max=config.results_mb << 20,
    )
    return KeysFile(config.api_keys_file, of_cell)


def _keyring(config: GatewaySettings) -> Keyring:
    """Without keys: whoever can call."""
    return Keyring(is_local=is_loopback(config.grpc_host))


def _template(card: ModelCard, config: GatewaySettings) -> TemplateProcess | None:
    if card.chat_template is None:
        return None
    limits = ChildLimits(text_bytes_max=2 * config.text_bytes_max)
    return TemplateProcess(
        card.chat_template, card.template_names, limits, control_texts=card.special_texts
    )


def build(argv: Sequence[str] | None = None) -> GatewayService:
    """Settings to service. ConfigError says which setting is wrong and why."""
    config = settings.load(GatewaySettings, "gateway", argv)
    logs.configure("gateway", config.log_level)
    log.info("settings", **settings.describe(config))
    return GatewayService(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Run until a signal. Returns the exit code."""
    return launch(lambda: build(argv))
