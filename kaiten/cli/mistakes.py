"""What is said of a command line that cannot be understood.

Flags of other servers that `kaiten serve` takes under their name stand in its `--help`; what to
say of the others stands here. docs/coming_from.md has both.
"""

import inspect
import shlex
from collections.abc import Mapping
from typing import Final

from cyclopts import App, CycloptsError, CycloptsPanel, UnknownOptionError, UnusedCliTokensError

SPLIT: Final = "a worker is one GPU with the whole model; more of them: --workers"
CHUNKED: Final = "prompts are always computed in chunks beside decodes; how: --mix"
PREFIXES: Final = "blocks of equal prefixes are always reused"

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
    "--hicache-size": HOST_MEMORY,
    "--model-id": "use --model, or the bare name",
    "--hostname": "use --host",
    "--quantize": "use --weight-dtype int8 or int4; quantized checkpoints are not read",
    "--num-shard": SPLIT,
    "--sharded": SPLIT,
    "--max-concurrent-requests": "use --requests-max",
    "--max-total-tokens": "use --context-tokens",
    "--max-input-tokens": "use --context-tokens",
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
    "--metrics": "/metrics of the HTTP API is always there; other parts: --metrics-port",
    "--timeout": "use --request-timeout-s",
}


def explained(error: CycloptsError, app: App) -> object:
    """The panel of a mistake. A flag of another server is told by its name here."""
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
