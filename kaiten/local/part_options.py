"""What `kaiten serve` hands on to its workers and its gateway: their own settings, under the names
people know from other servers too.

None leaves a part its own default, or what `KAITEN_WORKER_…` and `KAITEN_GATEWAY_…` say. Numbers
have the part's own bounds (`tests/contract/test_serve_bounds.py`), so that a wrong one starts
nothing; what else is wrong with a value the part itself says.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cyclopts import Parameter, Token, convert
from cyclopts.validators import Number

from kaiten.start_error import expanded

# The words of PyTorch, which vLLM takes, and of compressed-tensors and NNCF.
DTYPES: Final[Mapping[str, str]] = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
    "fp8_e4m3": "fp8",
    "w8a16": "int8",
    "w4a16": "int4",
    "int4_sym": "int4",
    "w4a16_asym": "int4_asym",
}


def our_dtype(kind: Any, tokens: Sequence[Token]) -> Any:
    """One of the choices, by our word or by PyTorch's."""
    return convert(kind, [each.evolve(value=DTYPES.get(each.value, each.value)) for each in tokens])


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Of every worker."""

    device: Annotated[
        str | None, Parameter(help="cpu, cuda or cuda:1; default: the first GPU, else the CPU")
    ] = None
    dtype: Annotated[
        Literal["auto", "bf16", "fp16", "fp32"] | None,
        Parameter(converter=our_dtype, help="computed in; default: auto"),
    ] = None
    weight_dtype: Annotated[
        Literal["auto", "int8", "int4", "int4_asym"] | None,
        Parameter(
            converter=our_dtype,
            help="on a CPU: int8, a byte per weight; int4, half a byte in groups of 32;"
            " int4_asym, with zero points; default: auto, as --dtype",
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["auto", "bf16", "fp8"] | None,
        Parameter(
            name=("--kv-dtype", "--kv-cache-dtype"),
            converter=our_dtype,
            help="of keys and values; default: auto, as --dtype",
        ),
    ] = None
    context_tokens: Annotated[
        int | None,
        Parameter(
            name=("--context-tokens", "--max-model-len"),
            help="longest sequence, prompt and output; default: what model and memory allow",
            validator=Number(gte=2),
        ),
    ] = None
    slots: Annotated[
        int | None,
        Parameter(
            name=("--slots", "--max-num-seqs"),
            help="sequences per worker at once",
            validator=Number(gte=1, lte=1024),
        ),
    ] = None
    # The last is the name of transformers' continuous batching.
    step_tokens: Annotated[
        int | None,
        Parameter(
            name=("--step-tokens", "--max-num-batched-tokens", "--max-batch-tokens"),
            help="tokens per step at most",
            validator=Number(gte=2, lte=65_536),
        ),
    ] = None
    mixed_step_ms: Annotated[
        float | None,
        Parameter(
            help="how long prompts may hold up those who decode, per step", validator=Number(gt=0)
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | None,
        Parameter(
            name=("--num-speculative-tokens", "--draft-max", "--speculate"),
            help="on a CPU: tokens drafted per step from what a text repeats; default: 0",
            validator=Number(gte=0, lte=15),
        ),
    ] = None
    gather_ms: Annotated[
        float | None,
        Parameter(
            help="gather the tokens of so long into one message; default: do not",
            validator=Number(gte=0, lte=1000),
        ),
    ] = None
    gpu_memory_share: Annotated[
        float | None,
        Parameter(
            name=("--gpu-memory-share", "--gpu-memory-utilization"),
            help="of the GPU's memory, for weights, steps and KV blocks; default: 0.9",
            validator=Number(gt=0, lte=1),
        ),
    ] = None
    kv_memory_mb: Annotated[
        int | None, Parameter(help="millions of bytes of each KV pool", validator=Number(gt=0))
    ] = None
    kv_host_memory_mb: Annotated[
        int | None,
        Parameter(
            help="millions of bytes of the host for KV blocks that leave a pool; default: 0",
            validator=Number(gte=0),
        ),
    ] = None
    kv_blocks: Annotated[
        int | None,
        Parameter(
            name=("--kv-blocks", "--num-gpu-blocks-override", "--num-blocks"),
            help="KV blocks, instead of --kv-memory-mb",
            validator=Number(gte=1),
        ),
    ] = None
    block_size: Annotated[
        int | None, Parameter(help="tokens per KV block", validator=Number(gte=1, lte=256))
    ] = None
    threads: Annotated[
        int | None, Parameter(help="CPU threads per worker", validator=Number(gte=1, lte=1024))
    ] = None
    deterministic: Annotated[
        bool | None,
        Parameter(
            name=("--deterministic", "--enable-deterministic-inference"),
            negative=(),
            help="on a GPU: the same text whatever is computed beside it, and if computed again;"
            " a CPU's compiled kernels do that anyway; default: do not",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Of the gateway: who may call, and with what."""

    api_keys_file: Annotated[
        Path | None,
        Parameter(help="tenants and their keys, see `kaiten keygen`; default: no keys"),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Parameter(
            name=("--tls-cert", "--ssl-certfile"),
            help="PEM certificate of both ports; default: no TLS. Renewed without a restart",
        ),
    ] = None
    tls_key: Annotated[
        Path | None, Parameter(name=("--tls-key", "--ssl-keyfile"), help="its key")
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        Parameter(
            name=("--tls-client-ca", "--ssl-ca-certs"),
            help="PEM authorities: only clients with a certificate of theirs; default: everybody",
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        Parameter(
            name=("--cors-origins", "--allowed-origins"),
            help="origins whose web pages may call the HTTP API, separated by commas",
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Parameter(help="names the HTTP API is called by, as behind a proxy; separated by commas"),
    ] = None
    requests_max: Annotated[
        int | None,
        Parameter(
            help="accepted and not over; beyond: 429; default: 4096", validator=Number(gte=1)
        ),
    ] = None
    request_timeout_s: Annotated[
        float | None,
        Parameter(
            help="deadline of requests that bring none; default: none", validator=Number(gte=0)
        ),
    ] = None
    results_mb: Annotated[
        int | None,
        Parameter(
            help="MiB of finished results to keep, half of it by a tenant; default: 512",
            validator=Number(gte=1, lte=1_073_741_824),
        ),
    ] = None
    files_mb: Annotated[
        int | None,
        Parameter(
            help="MiB of files of each tenant to keep; default: 256",
            validator=Number(gte=1, lte=1_073_741_824),
        ),
    ] = None
    files_hours: Annotated[
        float | None,
        Parameter(
            help="how long to keep a file; default: 48", validator=Number(gte=0.1, lte=87_600)
        ),
    ] = None
    accept_without_workers: Annotated[
        float | None,
        Parameter(
            help="accept while no worker is there; each request waits so many seconds for one",
            validator=Number(gte=0, lte=86_400),
        ),
    ] = None
    choices_max: Annotated[
        int | None, Parameter(help="largest n of a request", validator=Number(gte=1, lte=1024))
    ] = None
    logprobs_max: Annotated[
        int | None,
        Parameter(
            name=("--logprobs-max", "--max-logprobs"),
            help="log-probabilities per position",
            validator=Number(gte=0),
        ),
    ] = None
    unknown_fields: Annotated[
        Literal["refuse", "warn"] | None,
        Parameter(help="fields of requests that nobody knows: 400, or left out; default: refuse"),
    ] = None
    template_options: Annotated[
        str | None,
        Parameter(help="names clients may hand to the chat template, separated by commas"),
    ] = None
    log_requests: Annotated[
        bool | None,
        Parameter(
            name=("--log-requests", "--enable-log-requests"),
            negative=(),
            help="a line per request in the gateway's log: who, how it ended, tokens, phases",
        ),
    ] = None


def flags_of(options: WorkerOptions | GatewayOptions) -> dict[str, object]:
    """As the part itself takes them; None: not given. A path is that of here."""
    return dict(_flags(options))


def _flags(options: WorkerOptions | GatewayOptions) -> Iterator[tuple[str, object]]:
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, Path):
            value = expanded(value).resolve()
        yield f"--{field.name.replace('_', '-')}", value
