"""How many kernels a layer is in a step that only decodes: so many does a recorded step launch.

Of a device that is played: tensors have shapes and no memory, and what would be launched is noted.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.decoder import Decoder, Queries, StepTensors
from gpu_worker.model.weights import load_weights
from gpu_worker.runner.device_streams import CpuStreams
from gpu_worker.runner.graph_runner import GraphRunner
from gpu_worker.runner.step_graphs import buckets_of, decode_buckets
from kernels import dispatch, jit, variants
from kernels.attention.plan import SPLIT
from kernels.kv import fp8
from tests.support.random_model import write_random_model

ROWS_MAX, CONTEXT_MAX, BLOCK_SIZE = 5, 4 * SPLIT, 16
# What names memory and computes nothing.
ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty"}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}
GEMMA2 = {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 6.0,
}
OLMO2 = {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]}


@pytest.fixture(autouse=True)
def _on_its_kernels() -> Iterator[None]:
    dispatch.force("triton")
    yield
    dispatch.force(None)


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What a GPU would be asked to compute: torch's operators, and Triton's kernels, left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ALLOCATES:
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


# What launches kernels and does nothing else: none waits for the device, reads the host's memory or
# draws from torch's generators. Who adds one looks that up first (ATen/native/cuda).
RECORDABLE = {
    "clamp_min", "copy_", "div_", "index", "index_select", "linear", "mm", "mul", "mul_", "tanh_",
}  # fmt: skip


class Recordable(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses what no CUDA graph can hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        # Of tensors by their last size.
        self.by_width: dict[int, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.overloadpacket.__name__, tree_leaves((args, kwargs))
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        # A number that lies in the host's memory is copied, and waited for.
        assert {each.device.type for each in tensors} <= {"meta"}, f"{func} of the host's memory"
        if not func.is_view and name not in ALLOCATES:
            self.names.add(name)
            assert name in RECORDABLE, func
            for each in tensors:
                self.by_width[each.size(-1)].add(name)
        # Of a mask the host asks how many it lets through.
        is_mask = name == "index" and any(each.dtype == torch.bool for each in tensors[1:])
        assert not is_mask, func
        return func(*args, **(kwargs or {}))


class PlayedStreams(CpuStreams):
    """Tensors have shapes and no memory; what is recorded is refused where it cannot be."""

    def __init__(self) -> None:
        super().__init__()
        self.device, self.recordable = torch.device("meta"), Recordable()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with self.recordable:
            run()
        return run


@pytest.mark.parametrize("is_fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "changes", [{}, QWEN3, GEMMA2, OLMO2], ids=["llama", "qwen3", "gemma2", "olmo2"]
)
def test_recorded_steps_ask_the_host_nothing(
    tmp_path: Path, changes: dict[str, Any], is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every size, from their rows to their samples, edits and log-probabilities."""
    decoder, pages, limits = played_decoder(tmp_path / "model", changes, is_fp8=is_fp8)
    launched: set[str] = set()

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        assert min(grid) >= 1, kernel.__name__
        launched.add(kernel.__name__)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    streams = PlayedStreams()
    recorded: list[tuple[int, int]] = []
    GraphRunner(decoder, pages, limits, streams).record(lambda *done: recorded.append(done))
    # Otherwise nothing was looked at.
    assert recorded[-1] == (len(buckets_of(limits)),) * 2
    assert streams.recordable.names >= {"linear", "index_select", "index"}
    # Logits of a vocabulary are large: the head's product writes them where they stay, and nothing
    # else of torch's reads or writes them, unless the model caps them.
    of_logits = streams.recordable.by_width[limits.vocab_size]
    assert of_logits == ({"copy_", "div_", "mul_", "tanh_"} if changes is GEMMA2 else {"mm"})
    assert launched >= {"decode_kernel", "attend_kernel", "_step_rows_kernel", "_draw_kernel"}


@pytest.mark.parametrize("processors", [0, 132])
def test_a_deterministic_step_multiplies_by_no_library(
    tmp_path: Path, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no row of it is computed as rows that decode are."""
    wide = {"hidden_size": 1040, "head_dim": 16}
    decoder, pages, limits = played_decoder(
        tmp_path / "model", wide, is_fp8=False, is_deterministic=True
    )
    launched: set[str] = set()

    def noted(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launched.add(kernel.__name__)
        assert named.get("IS_LONG", True)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(jit, "processors_elsewhere", processors)
    streams = PlayedStreams()
    GraphRunner(decoder, pages, limits, streams).record()
    assert not streams.recordable.names & {"linear", "mm"}
    assert launched >= {"attend_kernel", "_linear_kernel", "_rope_write_kv_kernel"}
    assert "decode_kernel" not in launched
    assert ("_add_up_kernel" in launched) is (processors > 0)


def test_what_cannot_be_recorded_is_noticed() -> None:
    x = torch.empty(3, device="meta")
    refused: tuple[Callable[[], object], ...] = (
        lambda: torch.where(x > 0, x, torch.tensor(1.0)),
        lambda: x[x > 0],
        lambda: x.multinomial(1),
        lambda: x.to("cpu"),
    )
    for run in refused:
        with pytest.raises(AssertionError), Recordable():
            run()


def played_decoder(
    folder: Path,
    changes: dict[str, Any],
    *,
    is_fp8: bool,
    layers: int = 2,
    is_deterministic: bool = False,
) -> tuple[Decoder, torch.Tensor, RowLimits]:
    """A model whose tensors have no memory, and its pages."""
    written = write_random_model(folder, num_hidden_layers=layers, **changes)
    config, device = read_config(written), torch.device("meta")
    limits = RowLimits(
        slots=ROWS_MAX,
        context_tokens=64,
        step_tokens=48,
        block_size=BLOCK_SIZE,
        block_count=40,
        vocab_size=config.vocab_size,
        windows=config.groups.windows,
        reads_grammars=True,
    )
    with Checkpoint(written) as checkpoint:
        weights = load_weights(
            checkpoint,
            config,
            dtype=torch.bfloat16,
            device=device,
            is_deterministic=is_deterministic,
        )
    tile = config.kv_heads, BLOCK_SIZE, config.head_dim
    kv_dtype = fp8.DTYPE if is_fp8 else torch.bfloat16
    shape = config.groups.places, 2, limits.block_count, *tile
    pages = torch.empty(shape, dtype=kv_dtype, device=device)
    scales = torch.ones(config.layers, 2, config.kv_heads, device=device) if is_fp8 else None
    decoder = Decoder(
        config, weights, pages, context_tokens=limits.context_tokens, kv_scales=scales
    )
    return decoder, pages, limits


class CountingStreams(PlayedStreams):
    """Counts what is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = Launches()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        with self.counting:
            run()
        return run


def recorded_launches(folder: Path, layers: int, changes: dict[str, Any]) -> Counter[str]:
    """Of a whole step of rows with a token each, recorded."""
    decoder, pages, limits = played_decoder(folder, changes, is_fp8=False, layers=layers)
    limits, streams = replace(limits, reads_grammars=False), CountingStreams()
    names = streams.counting.names

    def counted(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        names[kernel.__name__] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", counted)
        buckets = decode_buckets([ROWS_MAX])
        GraphRunner(decoder, pages, limits, streams, buckets=buckets).record()
    return names


@pytest.mark.parametrize("changes", [{}, QWEN3], ids=["llama", "qwen3"])
def test_kernels_of_a_step_beside_its_layers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Whatever its rows want: rules, filters, log-probabilities."""
    few = recorded_launches(tmp_path / "few", 2, changes)
    of_two_layers = recorded_launches(tmp_path / "many", 4, changes) - few
    beside = few - of_two_layers
    assert of_two_layers.total() == 2 * 8
    assert beside.total() <= 17, beside
    # Of torch's: tables of the rows' blocks, and the head's product.
    own = {name: count for name, count in beside.items() if not name.endswith("_kernel")}
    assert own == {"clamp_min": 1, "index_select": 1, "mm": 1}


def launches_of(
    folder: Path, layers: int, changes: dict[str, Any], rows: int, context: int
) -> Counter[str]:
    """Of the forward pass of a step of rows with a token each."""
    written = write_random_model(folder, num_hidden_layers=layers, **changes)
    config, device = read_config(written), torch.device("meta")
    with Checkpoint(written) as checkpoint:
        weights = load_weights(checkpoint, config, dtype=torch.bfloat16, device=device)
    sizes = config.kv_heads, BLOCK_SIZE, config.head_dim
    decoder = Decoder(
        config,
        weights,
        torch.empty(layers, 2, 8, *sizes, dtype=torch.bfloat16, device=device),
        context_tokens=CONTEXT_MAX,
    )
    decoder.reserve(rows=ROWS_MAX, tokens=ROWS_MAX)
    groups, width = len(config.groups.windows), CONTEXT_MAX // BLOCK_SIZE
    step = StepTensors(
        token_ids=torch.empty(rows, dtype=torch.int64, device=device),
        positions=torch.empty(rows, dtype=torch.int64, device=device),
        slot_mapping=torch.empty(groups, rows, dtype=torch.int64, device=device),
        queries=Queries(
            starts=torch.empty(rows + 1, dtype=torch.int32, device=device),
            context_lengths=torch.empty(rows, dtype=torch.int32, device=device),
            row_max=1,
        ),
        block_tables=torch.empty(groups, rows, width, dtype=torch.int32, device=device),
        context_max=context,
    )
    counting = Launches()

    def counted(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        counting.names[kernel.__name__] += 1

    with pytest.MonkeyPatch.context() as patch, counting, torch.no_grad():
        patch.setattr(InterpretedFunction, "run", counted)
        decoder.forward(step)
    return counting.names


@pytest.mark.parametrize(
    ("changes", "most"),
    [({}, 8), (QWEN3, 8), (GEMMA2, 10), (OLMO2, 10)],
    ids=["llama", "qwen3", "gemma2", "olmo2"],
)
def test_kernels_of_a_layer_in_decode(tmp_path: Path, changes: dict[str, Any], most: int) -> None:
    few = launches_of(tmp_path / "few", 2, changes, rows=3, context=9)
    many = launches_of(tmp_path / "many", 4, changes, rows=3, context=9)
    of_two_layers = many - few
    assert of_two_layers["decode_kernel"] == 2
    assert of_two_layers.total() <= 2 * most, of_two_layers
    # Otherwise torch's were not seen.
    assert sum(of_two_layers[name] for name in ("mm", "addmm")) == 2 * 4


def test_neither_rows_nor_contexts_make_it_more(tmp_path: Path) -> None:
    few = launches_of(tmp_path / "few", 2, {}, rows=1, context=5)
    assert launches_of(tmp_path / "many", 2, {}, rows=5, context=3 * SPLIT) == few


def test_apart_it_is_two_kernels_more(tmp_path: Path) -> None:
    """So it is counted what there is to count."""
    in_one = launches_of(tmp_path / "one", 2, {}, rows=3, context=3 * SPLIT)
    with variants.forced("decode-in-one", False):
        apart = launches_of(tmp_path / "apart", 2, {}, rows=3, context=3 * SPLIT)
    assert apart.total() - in_one.total() == 2 * 2
