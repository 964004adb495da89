"""What grammars cost: CPU time per token of 64 rows with one, beside 64 rows without, in turns.

    python -m benchmarks.structured.cost [--shape small tiny] [--rows 64] [--rounds 9] [--save]

Random weights in bf16 and a byte-level tokenizer of the model's size, learnt from the text of
Python's own library. Both batches are of equal lengths, sample at temperature 1 and never end.
The CPU time is that of all threads, the masks computed beside a step included.

ratio       CPU time per token with grammars / without, median of the rounds' own ratios
masks_us    of it per token: the next mask, by the same tokens once more, without a model
applied_us  and writing it into logits
rest_us     what is left of the difference: rows, threads, and the logits' new values
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks import recording
from benchmarks.structured.tokenizer import END, learnt_tokenizer
from gateway.children.grammar_child import Compiler
from gpu_worker.batch.grammar_masks import GrammarMasks
from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.rows import Rows
from gpu_worker.runner.stepping import InTurns
from kernels import native
from kernels.sampling.token_masks import mask_logits
from service_kit.grammars import GrammarTokenizer
from tests.support.ahead import Model
from tests.support.mini_scheduler import MiniScheduler, sampling
from tests.support.random_model import write_random_model
from tests.support.tokenizers import token_id

# Of SmolLM2-135M, and of what is only grammar beside it.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "small": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    },
    "tiny": {"vocab_size": 512, "dtype": "bfloat16"},
}
LEASE: Final = 8
PROMPT: Final = 16
_TEXT: Final = {"type": "string", "minLength": 4, "maxLength": 60}
_RECORD: Final = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "kind": {"enum": ["person", "place", "thing", "event"]},
        "count": {"type": "integer", "minimum": 0, "maximum": 100000},
        "score": {"type": "number"},
        "is_open": {"type": "boolean"},
        "tags": {"type": "array", "items": _TEXT, "maxItems": 4},
        "note": {"anyOf": [{"type": "null"}, _TEXT]},
    },
    "required": ["name", "kind", "count", "is_open", "tags", "note"],
    "additionalProperties": False,
}
# None of them is complete before the rounds are over.
SCHEMAS: Final = (
    {"type": "array", "items": _RECORD, "minItems": 400},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3000},
    {"type": "array", "items": {"type": "string"}, "minItems": 3000},
    {"type": "array", "items": {"type": "object"}, "minItems": 1000},
)


class Batch:
    """`rows` rows that go on, each of a grammar of `grammars`, in turns."""

    def __init__(self, model: Model, masks: GrammarMasks, grammars: list[str], stop: int) -> None:
        self._masks, limits = masks, model.limits
        self._stepper = InTurns(Rows(limits, masks), model.turn_device())
        self._scheduler = MiniScheduler(limits, lease_steps=LEASE)
        for row in range(limits.slots):
            wish = sampling(
                max_tokens=limits.context_tokens - PROMPT,
                temperature=1.0,
                seed=row,
                stop_token_ids=(stop,) if grammars else (),
                grammar=grammars[row % len(grammars)] if grammars else "",
            )
            self._scheduler.submit(range(1, PROMPT + 1), wish)
        self.lease()

    @property
    def outputs(self) -> dict[int, list[int]]:
        return self._scheduler.outputs

    def lease(self) -> float:
        """Some steps; CPU seconds per token."""
        plan = self._scheduler.next_plan()
        assert plan is not None
        results: list[Any] = []
        started = time.process_time()
        self._stepper.run(plan, 0, results.append, lambda: False)
        # What the last step began is its cost, not the other batch's.
        self._masks._steps.submit(int).result()
        used = time.process_time() - started
        for result in results:
            assert not result.outcome.errors
            assert not result.outcome.finished
            self._scheduler.on_outcome(plan, result.step, result.outcome)
        return used / sum(len(result.outcome.token_ids) for result in results)


def _masks_alone(
    fresh: Callable[[], GrammarMasks], grammars: list[str], outputs: dict[int, list[int]], stop: int
) -> tuple[float, np.ndarray]:
    """CPU seconds per token of the same tokens, and the masks after them."""
    masks, rows = fresh(), list(outputs)
    for row in rows:
        wish = sampling(grammar=grammars[row % len(grammars)], stop_token_ids=(stop,))
        masks.join(row, wish, outputs[row][:LEASE])
    masks.masks(rows)
    took = []
    for step in range(LEASE, len(outputs[0])):
        started = time.process_time()
        masks.see(rows, [outputs[row][step] for row in rows])
        bits = masks.masks(rows)
        took.append((time.process_time() - started) / len(rows))
    return statistics.fmean(took), bits


def _applied(bits: np.ndarray, vocab_size: int) -> float:
    """CPU seconds per row."""
    # As the sampling's logits: written by the step itself, so not cold.
    logits = torch.randn(len(bits), vocab_size)
    rows, masks, took = torch.arange(len(bits)), torch.from_numpy(bits), []
    for _ in range(30):
        fresh = logits.clone()
        started = time.process_time()
        mask_logits(fresh, rows, masks)
        took.append((time.process_time() - started) / len(bits))
    return statistics.median(took)


def measure(shape: str, rows: int, rounds: int, folder: Path) -> dict[str, object]:
    config = SHAPES[shape]
    vocab_size = config["vocab_size"]
    tokenizer = learnt_tokenizer(vocab_size)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    write_random_model(folder, **config)
    context = PROMPT + LEASE * (rounds + 4)
    limits = RowLimits(
        slots=rows,
        context_tokens=context,
        step_tokens=rows * PROMPT,
        block_size=16,
        block_count=rows * -(-context // 16),
        vocab_size=vocab_size,
        reads_grammars=True,
    )
    model, stop = Model(folder, limits, dtype=torch.bfloat16), token_id(tokenizer, END)
    compiler = Compiler({"tokenizer": str(path), "vocab_size": vocab_size})
    grammars = [
        compiler({"form": "json", "value": json.dumps(schema), "is_tight": False})["grammar"]
        for schema in SCHEMAS
    ]
    read = GrammarTokenizer(path, vocab_size)

    def fresh() -> GrammarMasks:
        return GrammarMasks(read, vocab_size)

    kept, free = Batch(model, fresh(), grammars, stop), Batch(model, fresh(), [], stop)
    kept.lease(), free.lease()
    pairs = [(kept.lease(), free.lease()) for _ in range(rounds)]
    with_s, without_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    masks_s, bits = _masks_alone(fresh, grammars, kept.outputs, stop)
    applied_s = _applied(bits, vocab_size)
    return {
        "shape": shape,
        "rows": rows,
        "rounds": rounds,
        "vocab": tokenizer.get_vocab_size(),
        "threads": torch.get_num_threads(),
        "native": native.reason(),
        "with_us": round(with_s * 1e6, 1),
        "without_us": round(without_s * 1e6, 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "ratios": [round(a / b, 3) for a, b in sorted(pairs, key=lambda pair: pair[0] / pair[1])],
        "masks_us": round(masks_s * 1e6, 1),
        "applied_us": round(applied_s * 1e6, 1),
        "rest_us": round((with_s - without_s - masks_s - applied_s) * 1e6, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true")
    asked = parser.parse_args()
    native.build()
    for shape in asked.shape:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(shape, asked.rows, asked.rounds, Path(folder))
        recording.record("structured_cost", figures, save=asked.save)


if __name__ == "__main__":
    main()
