"""The worker one step ahead, on the torch path, on the Triton one: in Triton's interpreter.

Started by `test_triton_parity.py` with TRITON_INTERPRET=1 and, for each model, `whole` or `brief`,
KV_DTYPE and FOLDER; prints one JSON object per run. A brief one is not played ahead, and its worker
is not warmed up: these steps are dearer here than its prompts, and nobody sees what they say.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal
from unittest import mock

from gpu_worker.batch.plan_validation import RowLimits
from gpu_worker.batch.rows import Rows
from gpu_worker.model.config import read_config
from gpu_worker.runner.eager_runner import EagerRunner
from gpu_worker.service import loading
from gpu_worker.settings import WorkerSettings
from kernels import dispatch
from kernels.attention import decode_attention, triton_launch
from kernels.attention import plan as attention_plan
from kernels.kv import rope_write_kv
from kernels.norms_rope import gate_mul, rms_norm
from kernels.rows import advance_rows, step_rows
from kernels.sampling import logprobs, sample
from tests.support import quick_interpreter
from tests.support.ahead import Model, play
from tests.support.mini_scheduler import MiniScheduler
from tests.support.mini_scheduler import sampling as row_sampling

KvDtype = Literal["auto", "fp8"]
# Lengths at, beside and between the borders of blocks of four.
PROMPT_LENGTHS = (1, 4, 5, 13)
MAX_TOKENS = 5
NEVER_CUT = 1 << 30
# Chunks that split blocks and a lease over their borders.
CHUNK_TOKENS, LEASE_STEPS = 7, 3
# Of half of the rows, greedy and sampled.
EDITS: Final[dict[str, Any]] = {
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "presence_penalty": 0.1,
    "logit_bias": ((7, 4.0),),
    "bad_words": ((3,), (7, 7)),
    "allowed_token_ids": (*range(0, 97, 2), 7),
    "stop_token_ids": (8,),
    "min_tokens": 3,
}
# A chunk of each row at most; the warm-up takes as many.
STEP_TOKENS = 12


def count_launches(launches: Counter[str]) -> None:
    """Note every kernel launch by name."""
    attention = attention_plan, triton_launch, decode_attention
    modules = (*attention, logprobs, rms_norm, rope_write_kv, sample)
    for module in (*modules, gate_mul, step_rows, advance_rows):
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, _Counted(kernel, name, launches))


class _Counted:
    def __init__(self, kernel: Any, name: str, launches: Counter[str]) -> None:
        self._kernel, self._name, self._launches = kernel, name, launches

    def __getitem__(self, grid: object) -> Callable[..., None]:
        launch: Callable[..., None] = self._kernel[grid]

        @wraps(launch)
        def counted(*values: object, **named: object) -> None:
            self._launches[self._name] += 1
            launch(*values, **named)

        return counted


def run(folder: str, kv_dtype: KvDtype, path: str, *, is_warm: bool) -> MiniScheduler:
    """Every prompt to its end, four rows at a time; half of them sampled."""
    dispatch.force(path)
    settings = WorkerSettings(
        native="off",
        model=folder,
        dtype="fp32",
        kv_dtype=kv_dtype,
        slots=4,
        step_tokens=STEP_TOKENS,
        block_size=4,
        kv_blocks=64,
        threads=1,
    )
    with nullcontext() if is_warm else mock.patch.object(loading, "warm_up"):
        loaded = loading.load(settings)
    assert isinstance(loaded.runner, EagerRunner)
    rows = Rows(loaded.limits, loaded.grammars)
    scheduler = MiniScheduler(loaded.limits, chunk_tokens=CHUNK_TOKENS, lease_steps=LEASE_STEPS)
    submit_all(scheduler)
    while (plan := scheduler.next_plan()) is not None:
        counts = rows.apply(plan)
        for step in range(plan.lease_steps):
            inputs = rows.step_inputs(counts)
            outcome = rows.advance(inputs, loaded.runner.execute(inputs))
            scheduler.on_outcome(plan, step, outcome)
            counts = rows.steady_counts()
            if not counts.any():
                break
    return scheduler


def run_ahead(folder: str, kv_dtype: KvDtype) -> MiniScheduler:
    """Whole prompts, the rows on the device, decode steps by size, and one step ahead."""
    dispatch.force("triton")
    limits = RowLimits(
        slots=4,
        context_tokens=256,
        step_tokens=32,
        block_size=4,
        block_count=64,
        vocab_size=97,
        windows=read_config(Path(folder)).groups.windows,
    )
    scheduler = MiniScheduler(limits, lease_steps=LEASE_STEPS)
    submit_all(scheduler)
    model = Model(Path(folder), limits, is_kv_fp8=kv_dtype == "fp8")
    play(model.one_ahead(), scheduler, lambda: NEVER_CUT)
    return scheduler


def submit_all(scheduler: MiniScheduler) -> None:
    for index, length in enumerate(PROMPT_LENGTHS):
        prompt = [(7 * index + 3 * at) % 90 + 5 for at in range(length)]
        temperature = 0.8 * (index % 2)
        params = row_sampling(
            max_tokens=MAX_TOKENS,
            temperature=temperature,
            seed=index,
            logprobs=2,
            **(EDITS if index >= 2 else {}),
        )
        scheduler.submit(prompt, params)


def main(words: list[str]) -> None:
    quick_interpreter.install()
    launches: Counter[str] = Counter()
    count_launches(launches)
    for how, kv_dtype, folder in zip(words[::3], words[1::3], words[2::3], strict=True):
        is_whole = how == "whole"
        play_all(folder, "fp8" if kv_dtype == "fp8" else "auto", launches, is_whole=is_whole)


def play_all(folder: str, kv_dtype: KvDtype, launches: Counter[str], *, is_whole: bool) -> None:
    """One model, in its two or three ways."""
    if is_whole:
        launches.clear()
        tell("ahead", folder, run_ahead(folder, kv_dtype), launches)
    for path in ("torch", "triton"):
        launches.clear()
        tell(path, folder, run(folder, kv_dtype, path, is_warm=is_whole), launches)


def tell(path: str, folder: str, done: MiniScheduler, launches: Counter[str]) -> None:
    rows = range(len(PROMPT_LENGTHS))
    result = {
        "path": path,
        "folder": folder,
        "tokens": [done.outputs[index] for index in rows],
        "logprobs": [[row.logprob for row in done.logprobs[index]] for index in rows],
        "launches": dict(launches),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
