"""What a rounding of the weights does to what a model says: bf16, int8 and int4 beside fp32.

    python -m benchmarks.worker.weight_rounding [--model FOLDER] [--rows 16] [--tokens 96] [--save]

The model in fp32 writes `rows` texts of its own, greedily, each after a token drawn at random. The
others read the same texts and are asked for every next token.

logit_error   root mean square of the differences of logits / spread of the logits in fp32
divergence    Kullback-Leibler, of the next token's distribution from that of fp32: nats, mean
agreement     of greedy choices: how many are those of fp32
perplexity    of texts that the shipped model was not trained with; of no other model
"""

import argparse
import random
from pathlib import Path
from typing import Final, Protocol, get_args

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks import recording
from gpu_worker.model.checkpoint import Checkpoint
from gpu_worker.model.config import read_config
from gpu_worker.model.decoder import Decoder, Queries, StepTensors
from gpu_worker.model.model import ModelConfig
from gpu_worker.model.weights import Weights, load_weights
from gpu_worker.runner.kv_cache import PoolSize, allocate_pages, block_bytes
from kaiten.mini import CHECKPOINT
from kernels import native
from kernels.linear.packed_linear import WeightDtype
from tools.mini import grammar
from tools.mini.tokens import encode_text

BLOCK_SIZE: Final = 16
CPU: Final = torch.device("cpu")
# Of the computation, and what linears keep.
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
WEIGHTS: Final[tuple[WeightDtype, ...]] = get_args(WeightDtype)
KINDS: Final = {
    f"{name} {weights}".removesuffix(" auto"): (dtype, weights)
    for name, dtype in DTYPES.items()
    for weights in WEIGHTS
}


class Reads(Protocol):
    def step(self, token_ids: Tensor, position: int) -> Tensor: ...


class Reader:
    """Rows of equal length, a token of each per step."""

    def __init__(self, config: ModelConfig, weights: Weights, rows: int, tokens: int) -> None:
        dtype, blocks = weights.norm.dtype, -(-tokens // BLOCK_SIZE)
        pool = PoolSize(
            block_count=rows * blocks,
            block_size=BLOCK_SIZE,
            block_bytes=block_bytes(config, BLOCK_SIZE, dtype),
            context_tokens=tokens,
        )
        pages = allocate_pages(config, pool, dtype, CPU)
        self._decoder = Decoder(config, weights, pages, context_tokens=tokens)
        self._tables = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
        self._rows = torch.arange(rows)

    def step(self, token_ids: Tensor, position: int) -> Tensor:
        """Logits [rows, vocab] of what comes after these tokens."""
        rows = len(self._rows)
        blocks = self._tables[:, position // BLOCK_SIZE].long()
        states = self._decoder.forward(
            StepTensors(
                token_ids=token_ids,
                positions=torch.full((rows,), position),
                slot_mapping=(blocks * BLOCK_SIZE + position % BLOCK_SIZE)[None],
                queries=Queries(
                    starts=torch.arange(rows + 1, dtype=torch.int32),
                    context_lengths=torch.full((rows,), position + 1, dtype=torch.int32),
                    row_max=1,
                ),
                block_tables=self._tables[None],
            )
        )
        return self._decoder.logits(states, self._rows).float()


def write(reader: Reader, first: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Greedily: texts [tokens, rows], and the logits [tokens, rows, vocab] after each token."""
    texts, logits = [first], []
    for position in range(tokens):
        logits.append(reader.step(texts[-1], position))
        texts.append(logits[-1].argmax(dim=1))
    return torch.stack(texts[:-1]), torch.stack(logits)


def held_out(rows: int, tokens: int) -> Tensor:
    """Beginnings [tokens, rows] of texts of the shipped model's world, by a seed of their own."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    found: list[list[int]] = []
    draw = random.Random("weight_rounding")
    while len(found) < rows:
        ids, _ = encode_text(tokenizer, grammar.text(draw))
        if len(ids) >= tokens:
            found.append(ids[:tokens])
    return torch.tensor(found).T.contiguous()


def perplexity(reader: Reads, texts: Tensor) -> float:
    """e to the mean of what each next token costs, in nats."""
    logits = torch.stack([reader.step(ids, position) for position, ids in enumerate(texts[:-1])])
    nats = -logits.log_softmax(dim=-1).gather(2, texts[1:].unsqueeze(2)).mean()
    return round(float(nats.exp()), 4)


def compare(logits: Tensor, exact: Tensor) -> dict[str, float]:
    """The figures of the head of this file."""
    told, truth = logits.log_softmax(dim=-1), exact.log_softmax(dim=-1)
    divergence = (truth.exp() * (truth - told)).sum(dim=-1).mean()
    is_same = logits.argmax(dim=-1) == exact.argmax(dim=-1)
    return {
        "logit_error": round(float((logits - exact).square().mean().sqrt() / exact.std()), 5),
        "divergence": round(float(divergence), 6),
        "agreement": round(float(is_same.float().mean()), 4),
    }


@torch.inference_mode()
def measure(model: Path, rows: int, tokens: int) -> dict[str, dict[str, float]]:
    """Figures of each kind."""
    config = read_config(model)

    def reader(kind: str) -> Reader:
        dtype, weight_dtype = KINDS[kind]
        with Checkpoint(model) as checkpoint:
            weights = load_weights(
                checkpoint, config, dtype=dtype, device=CPU, weight_dtype=weight_dtype
            )
        return Reader(config, weights, rows, tokens)

    first = torch.randint(config.vocab_size, (rows,), generator=torch.manual_seed(0))
    texts, exact = write(reader("fp32"), first, tokens)
    found = {}
    for kind in KINDS:
        reads = reader(kind)
        logits = [reads.step(token_ids, position) for position, token_ids in enumerate(texts)]
        found[kind] = compare(torch.stack(logits), exact)
        if model == CHECKPOINT:
            found[kind]["perplexity"] = perplexity(reads, held_out(rows, tokens))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=CHECKPOINT)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    native.build()
    name = "kaiten-mini" if asked.model == CHECKPOINT else asked.model.name
    kinds = measure(asked.model, asked.rows, asked.tokens)
    figures = {"model": name, "rows": asked.rows, "tokens": asked.tokens, "kinds": kinds}
    recording.record("weight_rounding", figures, save=asked.save)


if __name__ == "__main__":
    main()
