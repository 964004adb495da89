"""Everything an operator can set on a scheduler."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr

from scheduler_svc.scheduling import SchedulingSettings
from service_kit.addresses import problem_of
from service_kit.peers import PartSettings


class SchedulerSettings(SchedulingSettings, PartSettings):
    """The one that decides each batch: leads a cell, or stands by."""

    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"),
        description="Redis >= 7.2 or Valkey: the ledger; may hold a password, so it is not logged;"
        " redis+cluster://HOST,HOST and redis+sentinel://HOST,HOST/NAME for several servers",
    )
    cell: str = Field(default="0", description="scheduler group; one leader each")
    allow_everysec: bool = Field(
        default=False, description="accept appendfsync everysec (a store crash may lose requests)"
    )
    store_replicas_min: int = Field(
        default=0, ge=0, description="replicas of the store that have a step before it counts"
    )
    store_replicas_ack: Literal["memory", "disk"] = Field(
        default="disk", description="where they have it: WAIT (memory) or WAITAOF (disk)"
    )
    grpc_host: str = Field(default="127.0.0.1", description="where workers register")
    grpc_port: int = Field(default=50052, ge=0, le=65535, description="0 picks a free port")
    metrics_host: str = Field(default="127.0.0.1", description="where /metrics is served")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="0: any free port; default: no /metrics"
    )
    metrics_tenants: bool = Field(
        default=False, description="queued and running tokens by tenant, of 256 at most"
    )
    advertise_address: str = Field(
        default="",
        description="host:port told to workers; default: where it is bound, or its address on the"
        " route to the store when bound to 0.0.0.0",
    )
    peer_credential_create: bool = Field(
        default=False, description="make the file of --peer-credential-file where there is none"
    )
    lease_ttl_s: float = Field(
        default=1.5, gt=0.1, description="a silent leader is replaced after this long"
    )
    uncommitted_steps_max: int = Field(
        default=32, ge=1, description="steps computed ahead of the ledger before planning pauses"
    )
    fold_records: int = Field(
        default=256, ge=1, description="journal records between two folds of old tokens"
    )
    journal_s: float = Field(
        default=30.0, ge=0, le=86_400, description="a gateway that is away for less misses nothing"
    )
    journal_mb: int = Field(
        default=64, ge=0, le=1 << 20, description="MiB of journal kept for that at most"
    )
    result_ttl_s: int = Field(default=600, ge=1, description="how long finished results are kept")
    response_ttl_s: int = Field(
        default=86_400, ge=1, description="and stored responses, if that is longer"
    )
    heartbeat_interval_ms: int = Field(
        default=500, ge=50, le=3_600_000, description="asked of workers"
    )
    worker_timeout_ms: int = Field(
        default=4000, ge=100, description="a worker this long silent is forgotten"
    )
    archive_dir: Path | None = Field(
        default=None, description="keep every decision in files here; default: keep none"
    )
    archive_prompts: bool = Field(
        default=True,
        description="with the tokens of prompts and outputs; else lengths and hashes of blocks",
    )
    archive_mb: int = Field(
        default=1024, ge=8, le=1 << 30, description="MiB of archive; the oldest of it is deleted"
    )
    archive_hours: float = Field(
        default=168.0, ge=0.01, le=1e6, description="and what is older than so many hours"
    )
    replay_s: int = Field(
        default=60,
        ge=0,
        le=600,
        description="seconds in which archives are read for who asks about a request of long ago,"
        " beside all other work; 0: they never are",
    )
    drain_s: float = Field(default=10.0, gt=0, description="limit of a drain after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    def model_post_init(self, context: object) -> None:
        super().model_post_init(context)
        if self.heartbeat_interval_ms >= self.worker_timeout_ms:
            raise ValueError("heartbeat_interval_ms must be less than worker_timeout_ms")
        if self.advertise_address and (rule := problem_of(self.advertise_address)):
            raise ValueError(f"advertise_address {rule}, got {self.advertise_address!r}")
        if self.peer_credential_create and self.peer_credential_file is None:
            raise ValueError("peer_credential_create needs peer_credential_file")
