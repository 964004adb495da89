"""Everything an operator can set on a scheduler."""

from typing import Literal

from pydantic import Field, SecretStr

from scheduler_svc.core.types import Config
from service_kit.settings import Settings


class SchedulerSettings(Settings):
    """Flags, environment (KAITEN_SCHEDULER_…) and TOML keys of `kaiten scheduler`."""

    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"),
        description="Redis >= 7.2 or Valkey: the ledger; may hold a password, so it is not logged",
    )
    cell: str = Field(default="0", description="scheduler group; one leader each")
    allow_everysec: bool = Field(
        default=False, description="accept appendfsync everysec (a store crash may lose requests)"
    )
    grpc_host: str = Field(default="127.0.0.1", description="where workers register")
    grpc_port: int = Field(default=50052, ge=0, le=65535, description="0 picks a free port")
    metrics_host: str = Field(default="127.0.0.1", description="where /metrics is served")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="0: any free port; default: no /metrics"
    )
    advertise_address: str = Field(
        default="",
        description="host:port told to workers; default: where it is bound, or its address on the"
        " route to the store when bound to 0.0.0.0",
    )
    policy: Literal["fair", "fcfs", "priority", "static"] = Field(
        default="fair", description="who runs first"
    )
    tenant_tokens_max: int = Field(
        default=0,
        ge=0,
        description="running tokens of a tenant whose keys file entry names no bound; 0: no bound",
    )
    lease_steps_max: int = Field(
        default=8, ge=1, le=64, description="steps a worker may run on by itself"
    )
    plans_in_flight_max: int = Field(
        default=2, ge=1, le=4, description="plans sent ahead of the first answer"
    )
    prefill_tokens_min: int = Field(
        default=16, ge=1, description="tokens of every step a waiting prefill gets at least"
    )
    preemptions_max: int = Field(
        default=3, ge=1, description="preemptions of a sequence; then others give way to it"
    )
    deaths_max: int = Field(
        default=2,
        ge=1,
        description="worker deaths without progress of a request: then it is tried alone",
    )
    misfit_wait_s: float = Field(
        default=30.0,
        ge=0.001,
        description="a request that only fits a lost worker waits this long for one like it",
    )
    lease_ttl_s: float = Field(
        default=3.0, gt=0.1, description="a silent leader is replaced after this long"
    )
    uncommitted_steps_max: int = Field(
        default=32, ge=1, description="steps computed ahead of the ledger before planning pauses"
    )
    fold_records: int = Field(
        default=256, ge=1, description="journal records between two folds of old tokens"
    )
    result_ttl_s: int = Field(default=600, ge=1, description="how long finished results are kept")
    heartbeat_interval_ms: int = Field(
        default=500, ge=50, le=3_600_000, description="asked of workers"
    )
    worker_timeout_ms: int = Field(
        default=5000, ge=100, description="a worker this long silent is forgotten"
    )
    drain_s: float = Field(default=10.0, gt=0, description="limit of a drain after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def model_post_init(self, _context: object) -> None:
        if self.heartbeat_interval_ms >= self.worker_timeout_ms:
            raise ValueError("heartbeat_interval_ms must be less than worker_timeout_ms")

    @property
    def core(self) -> Config:
        """What of it the core decides by."""
        return Config(
            lease_steps_max=self.lease_steps_max,
            plans_in_flight_max=self.plans_in_flight_max,
            prefill_tokens_min=self.prefill_tokens_min,
            preemptions_max=self.preemptions_max,
            deaths_max=self.deaths_max,
            misfit_wait_ns=int(self.misfit_wait_s * 1e9),
            tenant_tokens_max=self.tenant_tokens_max or None,
        )
