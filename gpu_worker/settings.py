"""What an operator can set on a worker."""

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from kernels import variants
from service_kit.addresses import problem_of
from service_kit.peers import PartSettings

# Streams pause for it while a prompt is computed beside them; a tenth more with what comes around.
MIXED_STEP_MS: Final = 130.0


class WorkerSettings(PartSettings):
    """A worker: loads a model and executes the scheduler's plans."""

    model: str = Field(description="checkpoint folder, or hub id like owner/name")
    served_model_name: str = Field(
        default="", description="name the model is served under; default: the last part of --model"
    )
    scheduler: tuple[str, ...] = Field(
        default=("127.0.0.1:50052",),
        min_length=1,
        description="host:port or unix:/path of the scheduler; several, comma-separated, if"
        " there are standbys",
    )
    grpc_host: str = Field(default="127.0.0.1", description="address to listen on")
    grpc_port: int = Field(default=0, ge=0, le=65535, description="port; 0 takes any free one")
    metrics_host: str = Field(default="127.0.0.1", description="where /metrics is served")
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="0: any free port; default: no /metrics"
    )
    advertise_address: str = Field(
        default="",
        description="host:port at which the scheduler reaches this worker; default: where it is"
        " bound, or its address on the route to the scheduler when bound to 0.0.0.0",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="cpu, cuda or cuda:1; auto: the first GPU, if there is one",
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        default="auto",
        description="auto: bf16, unless the checkpoint is fp32 (on a CPU) or fp16 (on a GPU)",
    )
    weight_dtype: Literal["auto", "int8", "int4", "int4_asym"] = Field(
        default="auto",
        description="rounded at load, on a CPU: int8, a byte per weight; int4, half a byte, in"
        " groups of 32, the head int8; int4_asym, with zero points; auto: --dtype",
    )
    kv_dtype: Literal["auto", "bf16", "fp8"] = Field(
        default="auto",
        description="of keys and values; auto: as --dtype; fp8 (e4m3): half the bytes of bf16, so"
        " twice the tokens in the same memory, at a small loss of accuracy",
    )
    # These defaults are a CPU's; a GPU's are `service.gpu_defaults`.
    slots: int = Field(
        default=64, ge=1, le=1024, description="rows of the batch; on a GPU: by its memory"
    )
    step_tokens: int = Field(
        default=512,
        ge=2,
        le=65536,
        description="tokens one step may compute, more than --slots; on a GPU: by its memory",
    )
    mixed_step_ms: float | None = Field(
        default=None,
        gt=0,
        description="how long prompts may make a step in which others decode; default: 130, and"
        " as long as it takes where --step-tokens is given",
    )
    num_speculative_tokens: int = Field(
        default=0,
        ge=0,
        le=15,
        description="tokens drafted of a row per step, on a CPU, from what its own text repeats;"
        " changes no token, and saves steps where few rows run; 0: none",
    )
    gather_ms: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="gather the results of plain steps this long and report them together; 0: every"
        " step as it ends",
    )
    block_size: int = Field(default=16, ge=1, le=256, description="tokens per KV block")
    kv_memory_mb: float | None = Field(
        default=None, gt=0, description="memory for KV blocks; default: a share of what is free"
    )
    kv_blocks: int | None = Field(
        default=None, ge=1, description="exact number of KV blocks, instead of --kv-memory-mb"
    )
    kv_host_memory_mb: float = Field(
        default=0,
        ge=0,
        description="memory of the host for KV blocks that leave the pool, in millions of bytes;"
        " 0: they are dropped",
    )
    context_tokens: int | None = Field(
        default=None, ge=2, description="longest sequence; default: what model and pool allow"
    )
    gpu_memory_share: float = Field(
        default=0.9, gt=0, le=1, description="of the GPU's memory, for weights, steps and KV blocks"
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="compute threads; default: as many as whole cores, also of a container",
    )
    native: Literal[
        "auto",
        "on",
        "off",
        "avx512-amx",
        "avx512-bf16",
        "avx512",
        "avx2",
        "generic",
        "neon-bf16",
        "neon",
    ] = Field(
        default="auto",
        description="the compiled CPU kernels; on: refuse to start without them; or those for these"
        " instructions in place of the best that the processor has",
    )
    kernel_variants: tuple[str, ...] = Field(
        default=(),
        description=f"of a GPU's kernels, comma-separated: {', '.join(variants.VARIANTS)}; each"
        " also as no-…; default: as the table in docs/operating.md says",
    )
    deterministic: bool = Field(
        default=False,
        description="on a GPU: a text has the same tokens whatever is computed beside it, and if it"
        " is computed again, at a price in speed; a CPU's compiled kernels always do that",
    )
    watch_steps: bool = Field(
        default=False,
        description="for debugging, on a GPU: end the worker, with the reason, at a step that after"
        " Ready compiles, asks for device memory or waits for the device while it is launched",
    )
    hung_s: float = Field(
        default=60.0, gt=0, description="its health is NOT_SERVING while a step lasts longer"
    )
    drain_s: float = Field(
        default=30.0, ge=0, description="how long a stopping worker waits for its work to move"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @property
    def slot_tokens_max(self) -> int:
        """That a step may give a row."""
        return 1 + self.num_speculative_tokens

    @property
    def mixed_step_s(self) -> float | None:
        """How long a step in which somebody decodes may take; None: `step_tokens` decides."""
        if self.mixed_step_ms is not None:
            return self.mixed_step_ms / 1000
        return None if "step_tokens" in self.model_fields_set else MIXED_STEP_MS / 1000

    @model_validator(mode="after")
    def _check_relations(self) -> Self:
        # What nobody has set makes room for what is set.
        slots = self.slots if "slots" in self.model_fields_set else 1
        rows, each = slots * self.slot_tokens_max, self.slot_tokens_max
        if "step_tokens" in self.model_fields_set and self.step_tokens <= rows:
            drafted = f" times num_speculative_tokens + 1 ({each})" if each > 1 else ""
            tokens = f"up to {each} tokens" if each > 1 else "one token"
            raise ValueError(
                f"step_tokens ({self.step_tokens}) must be more than slots ({slots}){drafted}: "
                f"every running row computes {tokens} per step, and a prompt needs room beside them"
            )
        if self.kv_blocks is not None and self.kv_memory_mb is not None:
            raise ValueError("kv_blocks and kv_memory_mb exclude each other")
        try:
            variants.wanted(self.kernel_variants)
        except ValueError as error:
            raise ValueError(f"kernel_variants {error}") from error
        if self.advertise_address and (rule := problem_of(self.advertise_address)):
            raise ValueError(f"advertise_address {rule}, got {self.advertise_address!r}")
        return self
