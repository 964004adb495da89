"""What tokens drafted by prompt lookup (`--num-speculative-tokens`) save, and what they cost.

    GOMP_SPINCOUNT=5000 python -m benchmarks.worker.speculation [--native avx2] [--save]

Rows and a device in one process, without and with drafts in turns; both must say the same tokens.

circle  greedy answers of a 128M model with random weights whose attention says nothing (zeros, as
        dear as others), so that each token decides the next and a text goes in a circle, which the
        prompt holds: every draft is accepted
story   greedy answers of the shipped model, which repeat a name here and there: little is accepted

ms is the median of the rounds: wall clock of the decoding steps per token and row.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, get_args

from safetensors.torch import load_file, save_file

from gpu_worker.service import runtime

runtime.prepare()  # Before torch is imported, as in a worker.
runtime.take_short_turns()

from benchmarks.peers.checkpoint import write_checkpoint  # noqa: E402
from benchmarks.recording import record  # noqa: E402
from benchmarks.serving.one_process import LEADER, greedy  # noqa: E402
from benchmarks.worker.weight_rounding import held_out  # noqa: E402
from gpu_worker.batch.drafts import NGRAM_MAX  # noqa: E402
from gpu_worker.batch.plans import (  # noqa: E402
    LEASE_STEPS_MAX,
    BlockTable,
    Join,
    Plan,
    StepResult,
)
from gpu_worker.batch.rows import Rows  # noqa: E402
from gpu_worker.batch.step_types import AheadRunner  # noqa: E402
from gpu_worker.runner.stepping import InTurns  # noqa: E402
from gpu_worker.service.loading import Loaded, load  # noqa: E402
from gpu_worker.settings import WorkerSettings  # noqa: E402
from kaiten.mini import CHECKPOINT  # noqa: E402
from kernels import native  # noqa: E402

BLOCK_SIZE: Final = 16
STORY_TOKENS: Final = 24
NATIVE: Final = get_args(WorkerSettings.model_fields["native"].annotation)
# In which a text of the model has come to its circle.
RUN_IN_TOKENS: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`rows` answers of `tokens` each, with up to `drafts` tokens drafted per row and step."""

    text: str
    rows: int
    drafts: int
    tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the rows said, and how: of the steps after the first, which computes the prompts."""

    outputs: dict[int, list[int]]
    steps: int
    drafted: int
    seconds: float


CASES: Final = (
    *(Case(text="circle", rows=rows, drafts=drafts) for rows in (1, 4, 8) for drafts in (2, 4, 8)),
    *(Case(text="story", rows=rows, drafts=4, tokens=96) for rows in (1, 4)),
)


def plan_of(case: Case, prompts: Sequence[Sequence[int]], slot_tokens: int) -> Plan:
    """Everything in one plan: all rows join, and go on until they end."""
    blocks = -(-(len(prompts[0]) + case.tokens) // BLOCK_SIZE)
    joins = tuple(
        Join(
            slot=row,
            sequence_id=row,
            token_ids=tuple(prompt),
            prompt_tokens=len(prompt),
            num_computed_tokens=0,
            block_tables=(BlockTable(tuple(range(row * blocks, (row + 1) * blocks))),),
            sampling=greedy(case.tokens),
        )
        for row, prompt in enumerate(prompts)
    )
    return Plan(
        leader=LEADER,
        plan_id=1,
        lease_steps=LEASE_STEPS_MAX,
        leaves=(),
        joins=joins,
        appends=(),
        copies=(),
        chunks=tuple((join.slot, len(join.token_ids)) for join in joins),
        slot_tokens_most=slot_tokens,
        membership_checksum=sum((row + 1) * (2 * row + 1) for row in range(case.rows)),
    )


def run(loaded: Loaded, case: Case, prompts: Sequence[Sequence[int]], drafts: int) -> Run:
    assert not isinstance(loaded.runner, AheadRunner), "drafts are a CPU's"
    rows = Rows(replace(loaded.limits, slot_tokens=1 + drafts, reads_grammars=False))
    results: list[StepResult] = []
    began: list[float] = []

    def took(result: StepResult) -> None:
        began.append(time.perf_counter())
        results.append(result)

    plan = plan_of(case, prompts, 1 + drafts)
    InTurns(rows, loaded.runner).run(plan, time.perf_counter_ns(), took, lambda: False)
    outputs: dict[int, list[int]] = {row: [] for row in range(case.rows)}
    for result in results:
        outcome = result.outcome
        for slot, token in zip(outcome.slots, outcome.token_ids, strict=True):
            outputs[slot].append(token)
    return Run(
        outputs=outputs,
        steps=len(results) - 1,
        drafted=sum(result.timings.drafted for result in results),
        seconds=began[-1] - began[0],
    )


def circle_of(loaded: Loaded) -> list[int]:
    """The tokens that a text of the model comes to say again and again."""
    alone = Case(text="circle", rows=1, drafts=0, tokens=RUN_IN_TOKENS)
    text = run(loaded, alone, [[5]], 0).outputs[0][::-1]
    return text[: text.index(text[0], 1)][::-1]


def around(circle: list[int], rows: int) -> list[list[int]]:
    """Each from its own place once around, and on again as far as is compared."""
    rounds = circle * (2 + (NGRAM_MAX + rows) // len(circle))
    return [rounds[row : row + len(circle) + NGRAM_MAX] for row in range(rows)]


def stories(rows: int) -> list[list[int]]:
    prompts: list[list[int]] = held_out(rows, STORY_TOKENS).T.tolist()
    return prompts


def silent(folder: Path) -> Path:
    """The checkpoint, attention of which adds nothing."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "o_proj" in name:
            tensor.zero_()
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def measure(
    loaded: Loaded, case: Case, prompts: Sequence[Sequence[int]], rounds: int
) -> dict[str, Any]:
    """Without and with drafts in turns."""
    plain: list[Run] = []
    drafting: list[Run] = []
    for _ in range(rounds):
        plain.append(run(loaded, case, prompts, 0))
        drafting.append(run(loaded, case, prompts, case.drafts))
        assert drafting[-1].outputs == plain[-1].outputs, "drafts change no token"
    last, tokens = drafting[-1], case.tokens - 1
    alone_ms = 1000 * median(each.seconds for each in plain) / tokens
    ms = 1000 * median(each.seconds for each in drafting) / tokens
    return {
        "text": case.text,
        "rows": case.rows,
        "drafts": case.drafts,
        "steps_alone": plain[-1].steps,
        "steps": last.steps,
        "drafted": last.drafted,
        "ms_alone": round(alone_ms, 3),
        "ms": round(ms, 3),
        "ratio": round(ms / alone_ms, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--weight-dtype", choices=("auto", "int8", "int4"), default="auto")
    parser.add_argument("--native", choices=NATIVE, default="auto")
    parser.add_argument("--drafts", type=int, choices=(2, 4, 8), help="default: each")
    parser.add_argument("--shape", choices=("125m", "15m", "tiny"), default="125m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    chosen = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory(prefix="kaiten-models-") as scratch:
        random = silent(write_checkpoint(Path(scratch) / chosen.shape, chosen.shape, chosen.dtype))
        for folder, text in ((random, "circle"), (CHECKPOINT, "story")):
            cases = [
                case for case in CASES if case.text == text and chosen.drafts in (None, case.drafts)
            ]
            if not cases:
                continue
            loaded = load(
                WorkerSettings(
                    model=str(folder),
                    device="cpu",
                    dtype=chosen.dtype,
                    weight_dtype=chosen.weight_dtype,
                    native=chosen.native,
                    slots=max(case.rows for case in cases),
                    step_tokens=8192,
                    block_size=BLOCK_SIZE,
                    kv_blocks=1024,
                )
            )
            prompts = partial(around, circle_of(loaded)) if text == "circle" else stories
            for case in cases:
                figures.append(measure(loaded, case, prompts(case.rows), chosen.rounds))
                print(figures[-1], flush=True)
    asked = {"shape": chosen.shape, "dtype": chosen.dtype, "weight_dtype": chosen.weight_dtype}
    asked["native"] = native.reason()
    record("speculation", {**asked, "rounds": chosen.rounds, "cases": figures}, save=chosen.save)


if __name__ == "__main__":
    main()
