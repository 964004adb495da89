"""What is said of a command line that cannot be understood.

Flags of other servers that `kaiten serve` takes under their name stand in its `--help`; what to
say of the others stands here. docs/coming_from.md has both.
"""

import inspect
import re
import shlex
from collections.abc import Mapping
from typing import Final, get_args

from cyclopts import (
    App,
    ArgumentCollection,
    CycloptsError,
    CycloptsPanel,
    UnknownOptionError,
    UnusedCliTokensError,
)

FRACTION: Final = re.compile(r"[+-]?[0-9_]*\.[0-9_]*", re.ASCII)

SPLIT: Final = "a worker is one GPU with the whole model; more of them: --workers"
CHUNKED: Final = "prompts are always computed in chunks beside decodes; how: --mix"
PREFIXES: Final = "blocks of equal prefixes are always reused"

REQUEST_SEED: Final = "a seed is given with a request"
LOADED: Final = "only *.safetensors are read"
METRICS: Final = "/metrics of the HTTP API is always there; other parts: --metrics-port"

TOOLS: Final = "tools are always on, in the chat template's format: KAITEN_GATEWAY_TOOL_FORMAT"
LORA: Final = "no LoRA yet: merge the adapter into the checkpoint"

HOST_MEMORY: Final = "use --kv-host-memory-mb, in millions of bytes"

# Of vLLM, SGLang, TGI and llama.cpp's llama-server, in this order.
INSTEAD: Final[Mapping[str, str]] = {
    "--tensor-parallel-size": SPLIT,
    "--pipeline-parallel-size": SPLIT,
    "--quantization": "use --weight-dtype int8 or int4; quantized checkpoints are not read",
    "--kv-cache-memory-bytes": "use --kv-memory-mb, in millions of bytes",
    "--swap-space": HOST_MEMORY,
    "--kv-offloading-size": HOST_MEMORY,
    "--enable-prefix-caching": PREFIXES,
    "--no-enable-prefix-caching": PREFIXES,
    "--enable-chunked-prefill": CHUNKED,
    "--no-enable-chunked-prefill": CHUNKED,
    "--api-key": "use --api-keys-file, see `kaiten keygen`: flags can be seen",
    "--chat-template": "put it into the model's folder, as chat_template.jinja",
    "--trust-remote-code": "code of checkpoints is never run",
    "--tokenizer": "the tokenizer is that of the model's folder",
    "--enable-auto-tool-choice": TOOLS,
    "--tool-call-parser": TOOLS,
    "--reasoning-parser": "it is found in the chat template; else KAITEN_GATEWAY_REASONING_FORMAT",
    "--enable-lora": LORA,
    "--lora-modules": LORA,
    "--uvicorn-log-level": "use --log-level",
    "--download-dir": "set HF_HOME in the environment",
    "--speculative-config": "use --num-speculative-tokens",
    "--disable-log-requests": "requests are logged with --log-requests only",
    "--disable-log-stats": "figures are on /metrics, not in logs",
    "--seed": REQUEST_SEED,
    "--load-format": LOADED,
    "--hf-token": "set HF_TOKEN in the environment",
    "--hicache-size": HOST_MEMORY,
    "--model-path": "use --model, or the bare name",
    "--context-length": "use --context-tokens",
    "--mem-fraction-static": "use --gpu-memory-share",
    "--max-running-requests": "use --slots, of each worker",
    "--max-queued-requests": "use --requests-max, of those that run and wait",
    "--chunked-prefill-size": "use --step-tokens",
    "--max-prefill-tokens": "use --step-tokens",
    "--schedule-policy": "use --order",
    "--page-size": "use --block-size",
    "--tp": SPLIT,
    "--tp-size": SPLIT,
    "--dp": "use --workers",
    "--dp-size": "use --workers",
    "--disable-radix-cache": PREFIXES,
    "--speculative-num-draft-tokens": "use --num-speculative-tokens",
    "--enable-metrics": METRICS,
    "--random-seed": REQUEST_SEED,
    "--model-id": "use --model, or the bare name",
    "--hostname": "use --host",
    "--quantize": "use --weight-dtype int8 or int4; quantized checkpoints are not read",
    "--num-shard": SPLIT,
    "--sharded": SPLIT,
    "--max-concurrent-requests": "use --requests-max",
    "--max-total-tokens": "use --context-tokens",
    "--max-input-tokens": "use --context-tokens",
    "--max-input-length": "use --context-tokens",
    "--huggingface-hub-cache": "set HF_HOME in the environment",
    "--otlp-endpoint": "set OTEL_EXPORTER_OTLP_ENDPOINT in the environment",
    "--max-batch-size": "use --slots",
    "--max-batch-prefill-tokens": "use --step-tokens",
    "--max-batch-total-tokens": "use --kv-blocks, of --block-size tokens each",
    "--max-waiting-tokens": "use --max-waiting-steps",
    "--max-best-of": "use --choices-max",
    "--cuda-memory-fraction": "use --gpu-memory-share",
    "--cors-allow-origin": "use --cors-origins",
    "--prometheus-port": "use --metrics-port",
    "--ctx-size": "use --context-tokens",
    "--parallel": "use --slots",
    "--batch-size": "use --step-tokens",
    "--ubatch-size": "use --step-tokens",
    "--alias": "use --served-model-name",
    "--cache-type-k": "use --kv-dtype",
    "--cache-type-v": "use --kv-dtype",
    "--n-gpu-layers": "the whole model is on one device: --device",
    "--gpu-layers": "the whole model is on one device: --device",
    "--hf-repo": "use --model, or the bare id",
    "--cont-batching": "batches are always continuous",
    "--api-key-file": "use --api-keys-file, see `kaiten keygen`",
    "--ssl-cert-file": "use --tls-cert",
    "--ssl-key-file": "use --tls-key",
    "--metrics": METRICS,
    "--timeout": "use --request-timeout-s",
}
# By the flag that a command has for it: how people say elsewhere which server is meant.
SERVERS: Final[Mapping[str, str]] = {
    "--address": "its gRPC API is meant by --address host:port",
    "--url": "its HTTP API is meant by --url http://host:port",
}
SERVER: Final = (*SERVERS, "--base-url", "--endpoint", "--host", "--port", "--server")


def whole_numbers(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """CycloptsError: a fraction where none can be; it would be rounded."""
    for each in arguments:
        if int not in (each.hint, *get_args(each.hint)):
            continue
        for token in each.tokens:
            if FRACTION.fullmatch(token.value):
                flag = token.keyword or each.name
                raise CycloptsError(msg=f"{flag} must be a whole number, got {token.value}")


def explained(error: CycloptsError, app: App) -> object:
    """The panel of a mistake. A flag of another server is told by its name here."""
    if isinstance(error, UnknownOptionError) and (said := of_server(error)):
        return CycloptsPanel(said)
    if isinstance(error, UnknownOptionError) and error.command_chain in (("serve",), ("run",)):
        (command,), keyword = error.command_chain, error.token.keyword or error.token.value
        flag = keyword.partition("=")[0]
        if flag in INSTEAD:
            return CycloptsPanel(f"kaiten {command} has no {flag}: {INSTEAD[flag]}.")
        if any(flag in each.names for each in app["serve"].assemble_argument_collection()):
            fix = "kaiten serve has it, and kaiten chat talks to what that serves"
            return CycloptsPanel(f"kaiten {command} has no {flag}: {fix}.")
    if isinstance(error, UnusedCliTokensError) and error.target is not None:
        return CycloptsPanel(of_unused(error))
    return CycloptsPanel(error)


def of_server(error: UnknownOptionError) -> str:
    """Of one that says which server is meant, and is another command's; empty: of another."""
    flag = (error.token.keyword or error.token.value).partition("=")[0]
    has = {name for each in error.argument_collection for name in each.names} & SERVERS.keys()
    if flag not in SERVER or len(has) != 1:
        return ""
    command = shlex.join(("kaiten", *(error.command_chain or ())))
    return f"{command} has no {flag}: {SERVERS[has.pop()]}."


def of_unused(error: UnusedCliTokensError) -> str:
    """Of words that no parameter of a command takes."""
    assert error.target is not None
    assert error.unused_tokens is not None
    command = shlex.join(("kaiten", *(error.command_chain or ())))
    words = shlex.join(error.unused_tokens)
    has_address = "address" in inspect.signature(error.target).parameters
    if has_address and len(error.unused_tokens) == 1 and ":" in words:
        return f"{command} takes an address by its flag: --address {words}"
    return f"{command} does not take {words}: see {command} --help"
