"""What keys and values in fp8 cost in accuracy: the same tokens over KV as the model computes, and
over fp8.

    python -m benchmarks.worker.kv_fp8 [--model FOLDER] [--dtype fp32] [--scale 1] [--save]

The model speaks for itself, sampling from a random first token; then both are told all of that, in
one pass. `agreed` of the positions have the same likeliest token; `logprob_error` is the mean
difference of the log-probability of what was said, `divergence` the mean Kullback-Leibler
divergence. And both go on by themselves, greedily, from the first tokens: `same` of the outputs are
the same to their end. With --save appended to results/kv_fp8.jsonl.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks import recording
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.decoder import Decoder, Queries, StepTensors
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.weights import Weights, load_weights
from gpu_worker.runner.kv_cache import PoolSize, allocate_pages, block_bytes
from kaiten.mini import CHECKPOINT
from kernels import native
from kernels.kv import fp8

SHIPPED: Final = CHECKPOINT
BLOCK_SIZE: Final = 16
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
SPOKEN_FROM: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    config: ModelConfig
    weights: Weights

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.norm.dtype

    @property
    def device(self) -> torch.device:
        return self.weights.norm.device


class Rows:
    """Rows of the same length over a cache of their own."""

    def __init__(self, model: Model, rows: int, tokens_max: int, scale: float | None) -> None:
        """`scale` of all KV, which then is fp8; None: as the model computes."""
        config, per_row = model.config, -(-tokens_max // BLOCK_SIZE)
        kv_dtype = model.dtype if scale is None else fp8.DTYPE
        pool = PoolSize(
            block_count=rows * per_row,
            block_size=BLOCK_SIZE,
            block_bytes=block_bytes(config, BLOCK_SIZE, kv_dtype),
            context_tokens=per_row * BLOCK_SIZE,
        )
        scales = None
        if scale is not None:
            scales = torch.full((config.layers, 2, config.kv_heads), scale)
        pages = allocate_pages(config, pool, kv_dtype, model.device)
        self._decoder = Decoder(
            config, model.weights, pages, context_tokens=pool.context_tokens, kv_scales=scales
        )
        order = torch.arange(pool.block_count, dtype=torch.int32, device=model.device)
        self._tables = order.view(rows, per_row)
        self._done = 0

    def feed(self, tokens: Tensor) -> Tensor:
        """[rows, count] more tokens -> the logits after each, [rows, count, vocab] float32."""
        rows, count = tokens.shape
        position = torch.arange(self._done, self._done + count, device=tokens.device)
        block = self._tables[:, position // BLOCK_SIZE].long()
        starts = torch.arange(rows + 1, dtype=torch.int32, device=tokens.device) * count
        self._done += count
        step = StepTensors(
            token_ids=tokens.flatten().contiguous(),
            positions=position.repeat(rows),
            slot_mapping=(block * BLOCK_SIZE + position % BLOCK_SIZE).reshape(1, -1),
            queries=Queries(
                starts=starts,
                context_lengths=torch.full_like(starts[:-1], self._done),
                row_max=count,
            ),
            block_tables=self._tables[None],
            context_max=self._done,
        )
        states = self._decoder.forward(step)
        every = torch.arange(rows * count, device=tokens.device)
        return self._decoder.logits(states, every).float().view(rows, count, -1)


def go_on(rows: Rows, tokens: Tensor, length: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """[rows, some] tokens -> [rows, length], each chosen from the logits after those before it."""
    logits = rows.feed(tokens)[:, -1]
    while tokens.size(1) < length:
        tokens = torch.cat([tokens, choose(logits).view(-1, 1)], 1)
        if tokens.size(1) < length:
            logits = rows.feed(tokens[:, -1:])[:, -1]
    return tokens


def compare(model: Model, *, rows: int, length: int, scale: float = 1.0) -> dict[str, float]:
    """The figures of this module's first words."""
    generator = torch.Generator(model.device).manual_seed(0)

    def draw(logits: Tensor) -> Tensor:
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)

    def either() -> tuple[Rows, Rows]:
        return Rows(model, rows, length, None), Rows(model, rows, length, scale)

    with torch.inference_mode():
        first = torch.randint(
            model.config.vocab_size, (rows, 1), generator=generator, device=model.device
        )
        said = go_on(Rows(model, rows, length, None), first, length, draw)
        whole, narrow = (each.feed(said).log_softmax(-1) for each in either())
        begun = said[:, : min(SPOKEN_FROM, length // 2)]
        ends = [go_on(each, begun, length, lambda logits: logits.argmax(-1)) for each in either()]
    error = (whole - narrow)[:, :-1].gather(-1, said[:, 1:, None]).abs()
    return {
        "agreed": float((whole.argmax(-1) == narrow.argmax(-1)).double().mean()),
        "logprob_error": float(error.double().mean()),
        "divergence": float((whole.exp() * (whole - narrow)).sum(-1).double().mean()),
        "same": float((ends[0] == ends[1]).all(-1).double().mean()),
    }


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> Model:
    # It needs pydantic, without which the GPU script must do.
    from gpu_worker.model.config import read_config

    config = read_config(folder)
    with Checkpoint(folder) as checkpoint:
        weights = load_weights(checkpoint, config, dtype=dtype, device=device)
    return Model(config=config, weights=weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    native.build()
    model = load_model(asked.model, DTYPES[asked.dtype], torch.device("cpu"))
    figures = compare(model, rows=asked.rows, length=asked.length, scale=asked.scale)
    setting = {key: value for key, value in vars(asked).items() if key not in ("save", "model")}
    what = "kaiten-mini" if asked.model == SHIPPED else asked.model.resolve().name
    recording.record("kv_fp8", {"model": what, **setting, **figures}, save=asked.save)


if __name__ == "__main__":
    main()
