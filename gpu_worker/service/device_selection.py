"""What a worker computes on and in: the device and the dtype, or why not."""

import warnings
from typing import Final

import torch

from gpu_worker.model.model import ModelConfig
from kernels import native
from kernels.attention.paged_attention import HEAD_DIM_MAX
from kernels.attention.plan import GROUP_MAX
from kernels.kv import fp8
from kernels.linear.linear_int4 import GROUP
from kernels.linear.packed_linear import WeightDtype, is_fast, is_int4
from service_kit.errors import ConfigError

_DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# fp8 is for keys and values only.
DTYPE_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()} | {fp8.DTYPE: "fp8"}
_FP32_CHECKPOINTS: Final = ("float32", "float64")
# Ampere: the first with bfloat16 in its tensor cores, and the oldest that the kernels are for.
_CAPABILITY_MIN: Final = (8, 0)


def choose_device(asked: str) -> torch.device:
    """auto: the first GPU that torch sees, else the CPU.

    But not where torch was built for GPUs and cannot reach one: that is a fault of the machine,
    and a worker a hundred times slower than expected hides it.
    """
    if asked == "cpu":
        return torch.device("cpu")
    reason, has_cuda = _unreachable(), torch.version.cuda is not None
    if asked == "auto" and reason is not None and not has_cuda:
        return torch.device("cpu")
    if reason is not None:
        advice = "look at nvidia-smi" if has_cuda else "install a CUDA build of torch"
        raise ConfigError(
            f"--device {asked}, but torch {torch.__version__} finds no CUDA device ({reason}); "
            f"{advice}, or take --device cpu to compute on the CPU"
        )
    device = torch.device("cuda" if asked == "auto" else asked)
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"--device {asked}, but there are {torch.cuda.device_count()} CUDA devices, numbered "
            "from 0"
        )
    capability = torch.cuda.get_device_capability(index)
    if capability < _CAPABILITY_MIN:
        raise ConfigError(
            f"--device {asked} is a {torch.cuda.get_device_name(index)} of compute capability "
            f"{capability[0]}.{capability[1]}; kaiten's kernels need at least 8.0"
        )
    # What names no device, as pinned memory, goes with this one.
    torch.cuda.set_device(index)
    sum_in_float32()
    return torch.device("cuda", index)


def sum_in_float32() -> None:
    """Matrix products of 16-bit numbers on a GPU: parts of a sum are kept in float32 to its end.

    torch's default lets cuBLAS add the parts of a split product in 16 bits, as many as it likes.
    """
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def _unreachable() -> str | None:
    """Why torch can use no GPU, in its own words; None: it can."""
    with warnings.catch_warnings():
        # A driver too old is told as a warning, and again below.
        warnings.simplefilter("ignore")
        if torch.cuda.is_available():
            return None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return "none is visible; see CUDA_VISIBLE_DEVICES, and the devices of the container"


def choose_dtype(asked: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """A GPU computes in half the width unless told otherwise, a CPU as the checkpoint is.

    Never in float16 on a CPU, where it is hundreds of times slower than bfloat16; and in bfloat16
    only if asked for where this process has nothing faster for it than an emulation.
    """
    is_cpu = device.type == "cpu"
    if asked == "fp16" and is_cpu:
        raise ConfigError(
            "--dtype fp16 is for GPUs, a CPU is hundreds of times faster in bf16; take --dtype bf16"
        )
    if asked != "auto":
        return _DTYPES[asked]
    if checkpoint_dtype == "float16" and not is_cpu:
        return torch.float16
    if is_cpu and (checkpoint_dtype in _FP32_CHECKPOINTS or not is_fast(torch.bfloat16)):
        return torch.float32
    return torch.bfloat16


def check_weight_dtype(asked: WeightDtype, config: ModelConfig, device: torch.device) -> None:
    """ConfigError where weights cannot be kept so."""
    if asked != "auto" and device.type != "cpu":
        raise ConfigError(
            f"--weight-dtype {asked} is for CPUs, on {device} weights are of --dtype; take "
            "--weight-dtype auto, or --device cpu"
        )
    if not is_int4(asked):
        return
    for name, width in (
        ("hidden_size", config.hidden_size),
        ("num_attention_heads * head_dim", config.heads * config.head_dim),
        ("intermediate_size", config.inner_size),
    ):
        if width % GROUP:
            raise ConfigError(
                f"config.json: {name} is {width}, and --weight-dtype {asked} keeps groups of "
                f"{GROUP} inputs, so it must be a multiple of {GROUP}; take --weight-dtype int8"
            )


def check_speculation(num_speculative_tokens: int, device: torch.device) -> None:
    """ConfigError where no tokens can be drafted."""
    if num_speculative_tokens and device.type != "cpu":
        raise ConfigError(
            f"--num-speculative-tokens {num_speculative_tokens} is for CPUs: on {device} a step is "
            "launched before the tokens of the last are known; take 0, or --device cpu"
        )


def check_deterministic(device: torch.device, *, is_asked: bool) -> None:
    """ConfigError where the kernels that were chosen do not promise it."""
    if is_asked and device.type == "cpu" and not native.available():
        raise ConfigError(
            f"--deterministic, but on this CPU there are no compiled kernels ({native.reason()}); "
            f"of torch's it is {native.promise()}"
        )


def promise_on_gpu(*, is_deterministic: bool) -> str:
    """One line for people, as `native.promise` of a CPU."""
    if is_deterministic:
        return (
            "a text computed again, by deterministic workers on GPUs of this kind, is the same to"
            " the bit; no GPU has shown it yet"
        )
    return (
        "not promised: a row's last bits depend on how many rows are computed with it, and may turn"
        " what is nearly a tie. --deterministic forbids that"
    )


def choose_watch(device: torch.device, *, is_asked: bool) -> bool:
    """Whether launches are watched."""
    if is_asked and device.type == "cpu":
        raise ConfigError(
            "--watch-steps is for GPUs: a CPU launches nothing ahead of the host; leave it out, or "
            "take --device cuda"
        )
    return is_asked


def choose_kv_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """auto: that of the model. The kernels know fp8 on every device; a third dtype they do not."""
    if asked == "fp8":
        return fp8.DTYPE
    if asked == "bf16" and dtype != torch.bfloat16:
        raise ConfigError(
            f"--kv-dtype bf16, but the model computes in {DTYPE_NAMES[dtype]}; keys and values are "
            "kept in the dtype of the model or in fp8: take --kv-dtype auto, or --dtype bf16"
        )
    return dtype


def check_heads(config: ModelConfig, device: torch.device) -> None:
    """On a GPU only the kernels attend: torch's path waits for the device, which no graph may."""
    if device.type == "cpu":
        return
    group = config.heads // config.kv_heads
    for name, count, most in (
        ("head_dim", config.head_dim, HEAD_DIM_MAX),
        ("num_attention_heads / num_key_value_heads", group, GROUP_MAX),
    ):
        if count > most:
            raise ConfigError(
                f"config.json: {name} is {count}, and kaiten's kernels for GPUs take at most "
                f"{most}; take --device cpu, or another model"
            )


def numeric_class(
    device: torch.device, computed: str, kv_dtype: torch.dtype, *, is_deterministic: bool
) -> str:
    """What may differ in the last bits between workers, and with them a token. `computed`: as
    `dtype_text` says it.
    """
    if device.type == "cpu":
        path = "native" if native.available() else "torch"
    else:
        path = "triton sm{}{}".format(*torch.cuda.get_device_capability(device))
        path += " deterministic" if is_deterministic else ""
    return f"{device.type} {computed} {path}, KV in {DTYPE_NAMES[kv_dtype]}"


def dtype_text(dtype: torch.dtype, weight_dtype: WeightDtype) -> str:
    """What is computed in, and what the weights are where they are not of it."""
    kept = "" if weight_dtype == "auto" else f" with {weight_dtype} weights"
    return DTYPE_NAMES[dtype] + kept


def device_name(device: torch.device) -> str:
    """For people."""
    if device.type == "cpu":
        return f"cpu ({torch.get_num_threads()} threads, {native.reason()})"
    return f"{device} ({torch.cuda.get_device_name(device)})"
