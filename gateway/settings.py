"""The gateway's settings: each is a flag, an environment variable and a key of the TOML file."""

import re
from pathlib import Path
from typing import Final, Literal, Self

from pydantic import Field, SecretStr, model_validator

from gateway.requests.validation import ROLES
from gateway.text.tools import formats
from service_kit.peers import PeerSettings
from service_kit.settings import Settings, grouped

# As browsers write it: no path, not even a slash.
ORIGIN: Final = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/A-Z]+")


@grouped("Limits")
class RequestLimits(Settings):
    """What is refused, and how much at once."""

    streams_max: int = Field(default=4096, ge=1, description="streams followed at once")
    choices_max: int = Field(default=16, ge=1, le=1024, description="largest n of a request")
    accept_without_workers: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="seconds that a request waits for a worker while none is there; such requests"
        " are accepted, and the gateway is ready. 0: not ready, none before the first worker",
    )
    prompts_max: int = Field(default=64, ge=1, description="prompts of one call")
    stops_max: int = Field(default=16, ge=0, description="stop strings of a request")
    stop_chars_max: int = Field(default=256, ge=1, description="characters of a stop string")
    logprobs_max: int = Field(default=20, ge=0, description="log-probabilities per position")
    prompt_values_max: int = Field(
        default=1 << 15,
        ge=1,
        # So many still fit a message of 4 MiB. As JSON they hold everybody up: 3 us each.
        le=1 << 19,
        description="prompt tokens times (prompt_logprobs + 1)",
    )
    text_bytes_max: int = Field(default=4 << 20, ge=1, description="prompt text before tokenizing")
    body_bytes_max: int = Field(
        # As JSON 8 MiB of escapes hold everybody up for some 30 ms.
        default=8 << 20,
        ge=1,
        description="HTTP body before parsing",
    )
    body_values_max: int = Field(
        default=1 << 18,
        ge=1,
        description="JSON values of an HTTP body; each holds everybody up for about 60 ns",
    )
    bodies_bytes_max: int = Field(
        default=256 << 20,
        ge=1,
        description="HTTP bodies coming in at once, beyond the first 64 KiB of each",
    )
    body_s_max: float = Field(
        default=60.0, gt=0, description="a request's HTTP body must be there after this"
    )
    headers_s_max: float = Field(
        default=10.0, gt=0, description="a request's HTTP headers must be there after this"
    )
    http_connections_max: int = Field(
        default=8192, ge=1, description="HTTP connections; streams take one each"
    )
    rpcs_max: int = Field(
        default=8192, ge=1, description="gRPC calls at once, those that stream among them"
    )
    watches_max: int = Field(
        default=256, ge=1, description="of them health watches, and as many for reflection"
    )
    request_timeout_s: float = Field(
        default=0.0, ge=0, description="deadline of requests that bring none; 0: none"
    )
    requests_max: int = Field(default=4096, ge=1, description="live choices of the whole cell")
    prompt_tokens_max: int = Field(
        default=4_000_000, ge=1, description="live prompt tokens of the whole cell"
    )
    results_mb: int = Field(
        default=512,
        ge=1,
        le=1 << 30,
        description="MiB of finished results in the store; beyond half of"
        " it they are kept for less",
    )
    files_mb: int = Field(
        default=256, ge=1, le=1 << 30, description="MiB of files in the store, of each tenant"
    )
    files_hours: float = Field(
        default=48.0, ge=0.1, le=87_600, description="how long a file is kept"
    )


class GatewaySettings(RequestLimits, PeerSettings):
    """The public door: gRPC and OpenAI HTTP in, text out."""

    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"),
        description="where the ledger is; unix:///path works too, redis+cluster://HOST,HOST and"
        " redis+sentinel://HOST,HOST/NAME",
    )
    cell: str = Field(default="0", description="the scheduler group to serve")
    model: Path = Field(
        description="the model's folder, or a hub id like owner/name; weights are not read"
    )
    served_model_name: str = Field(
        default="", max_length=256, description="the name clients use; empty: the folder's name"
    )
    grpc_host: str = "127.0.0.1"
    grpc_port: int = Field(default=50051, ge=0, le=65535, description="0: any free port")
    http_host: str = "127.0.0.1"
    http_port: int = Field(default=8000, ge=0, le=65535, description="0: any free port")
    grpc_socket: Path | None = Field(
        default=None,
        description="unix socket of the gRPC API, besides the port and without TLS: whoever may"
        " enter its folder",
    )
    tls_cert: Path | None = Field(
        default=None,
        description="PEM certificate of both ports, and those up to its authority; none: no TLS."
        " Followed while the gateway runs, as the two below",
    )
    tls_key: Path | None = Field(default=None, description="its key, in PEM, not encrypted")
    tls_client_ca: Path | None = Field(
        default=None, description="PEM authorities: only clients with a certificate of theirs"
    )
    metrics: bool = Field(default=True, description="serve /metrics on the HTTP port, to anybody")
    metrics_tenants: bool = Field(
        default=False, description="count by tenant too; /metrics then names them"
    )
    reflection: bool = Field(default=True, description="let clients list the gRPC services")
    keda_scaler: bool = Field(
        default=False,
        description="tell KEDA, or whoever asks by gRPC without a key, how loaded the cell is",
    )
    log_level: str = "info"
    log_requests: bool = Field(
        default=False, description="a log line per request: who, how it ended, tokens, phases"
    )
    api_keys_file: Path | None = Field(
        default=None, description="TOML file of tenants and their keys' digests; none: no keys"
    )
    connection_age_s_max: int = Field(
        default=1800, ge=1, description="clients reconnect after this; open streams outlive it"
    )
    message_bytes_max: int = Field(
        default=4 << 20, ge=1024, description="one gRPC message from a client"
    )
    metadata_bytes_max: int = Field(
        default=16 << 10, ge=1024, description="gRPC metadata of one call"
    )
    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="origins whose web pages may call the HTTP API, as https://chat.example;"
        " none: no other site's page may; *: any",
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=(),
        description="names that the HTTP API is called by, besides localhost and addresses;"
        " none: no others on loopback, any elsewhere; *: any",
    )
    sse_ping_s: float = Field(
        default=15.0, gt=0, description="a comment keeps a silent event stream open this often"
    )
    unknown_fields: Literal["refuse", "warn"] = Field(
        default="refuse",
        description="fields of HTTP bodies that nobody knows: 400, or left out, which the answer's"
        " x-ignored-fields and the log tell",
    )
    template_options: tuple[str, ...] = Field(
        default=("enable_thinking", "thinking", "reasoning_effort", "date_string"),
        description="names clients may hand to the chat template",
    )
    tool_format: str = Field(
        default=formats.AUTO,
        description="how the model writes tool calls: "
        + ", ".join(each.name for each in formats.TOOL_FORMATS)
        + "; auto: as its chat template shows; none: tools are refused",
    )
    reasoning_format: str = Field(
        default=formats.AUTO,
        description="how it marks its reasoning: "
        + ", ".join(each.name for each in formats.REASONING_FORMATS)
        + "; auto: as its chat template shows; none: it stays in the text",
    )
    chat_roles: tuple[str, ...] = Field(
        default=ROLES, description="roles of messages; templates may make control tokens of them"
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="running streams get this long after SIGTERM"
    )
    allow_everysec: bool = Field(
        default=False, description="accept a store with appendfsync everysec, which may lose work"
    )
    store_replicas_min: int = Field(
        default=0, ge=0, description="replicas of the store that have a request before it counts"
    )
    store_replicas_ack: Literal["memory", "disk"] = Field(
        default="disk", description="where they have it: WAIT (memory) or WAITAOF (disk)"
    )
    leader_quiet_s_max: float = Field(
        default=10.0, gt=0, description="not ready when no scheduler renewed for this long"
    )
    stalled_ms_max: int = Field(
        default=10_000, ge=1, description="not ready when work is runnable but stands this long"
    )

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.choices_max > self.requests_max:
            raise ValueError("choices_max must be at most requests_max")
        if self.text_bytes_max > self.body_bytes_max:
            raise ValueError("text_bytes_max must be at most body_bytes_max")
        if self.body_bytes_max > self.bodies_bytes_max:
            raise ValueError("body_bytes_max must be at most bodies_bytes_max")
        for name, known in (
            ("tool_format", formats.TOOL_FORMATS),
            ("reasoning_format", formats.REASONING_FORMATS),
        ):
            names = (formats.AUTO, formats.NONE, *(each.name for each in known))
            if getattr(self, name) not in names:
                raise ValueError(f"{name} must be one of {', '.join(names)}")
        wrong = next((each for each in self.cors_origins if not ORIGIN.fullmatch(each)), None)
        if wrong is not None:
            raise ValueError(f"cors_origins must be like https://chat.example:8443, got {wrong!r}")
        return self
