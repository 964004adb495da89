"""docs/scheduling.md draws what each mode does to one crowd; here it does so.

    python -m pytest tests/unit/scheduler_svc/test_scheduling_page.py --rewrite

draws anew.
"""

import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from scheduler_svc.core.policy.presets import PRESETS
from scheduler_svc.core.policy.rules import TABLES
from scheduler_svc.scheduling import SchedulingSettings
from tests.support.cell import Cell, spec

PAGE = Path(__file__).parents[3] / "docs" / "scheduling.md"
SLOTS = 4
# By letter: when it comes (before that step), tokens of its prompt and of its output.
CROWD = {
    "a": (0, 4, 18),
    "b": (0, 4, 6),
    "c": (3, 30, 4),
    "d": (3, 6, 5),
    "e": (4, 3, 3),
    "f": (9, 12, 4),
}
MODES: dict[str, dict[str, Any]] = {
    "chunked": {},
    "merged_prefill": {"mix": "merged_prefill"},
    "prefill_first": {"mix": "prefill_first"},
    "every_step": {"cadence": "every_step"},
    "interval": {"cadence": "interval", "schedule_interval_steps": 6},
    "wait_for_batch_end": {"admission": "wait_for_batch_end:12"},
    "guaranteed_no_evict": {"admission": "guaranteed_no_evict"},
    "static": {"policy": "static"},
}
# Blocks are short only where the admission is the point.
BLOCKS = {"guaranteed_no_evict": 16}


class Drawing:
    """A run of the crowd, step by step."""

    def __init__(self, mode: str) -> None:
        worker = spec(
            slots=SLOTS,
            step_tokens=16,
            mixed_tokens=8,
            block_size=4,
            blocks=BLOCKS.get(mode, 1000),
        )
        self.cell = Cell(worker, lease=4, in_flight=1, prefill_tokens=1, **MODES[mode])
        self.letters: dict[int, str] = {}
        self.lines = [""] * SLOTS
        self.plans = 0
        # By letter: steps in which it got a token.
        self.tokens: dict[str, list[int]] = defaultdict(list)
        step = 0
        while step < 10 or self.cell.scheduler.live_count:
            self._arrive(step)
            self._step(step)
            step += 1
        self.steps = step
        self.cell.turns(2)
        self.cell.judge()

    def _arrive(self, step: int) -> None:
        for letter, (when, prompt, output) in CROWD.items():
            if when == step:
                self.letters[self.cell.submit(prompt, output)] = letter

    def _step(self, step: int) -> None:
        chunks: dict[int, int] = {}
        self.cell.now_ns += 1
        while (plan := self.cell.plan()) is not None:
            self.plans += 1
            chunks = dict(plan.chunks)
        worker = self.cell.workers["w1"]
        held = {slot: row.sequence_id for slot, row in worker.rows.items()}
        result = worker.step()
        if result is None:
            return
        booked = self.cell.commit(result)
        rows = {slot: row for slot, row in worker.rows.items() if row.sequence_id or held}
        for slot in range(SLOTS):
            row = rows.get(slot)
            letter = self.letters[row.sequence_id] if row is not None else " "
            if chunks.get(slot) and result.step == 0:
                mark = letter.upper()
            elif slot in booked.slots:
                mark = letter
            else:
                mark = "-" if row is not None and not row.is_finished else " "
            self.lines[slot] += mark
            if slot in booked.slots:
                self.tokens[letter].append(step)

    def text(self) -> str:
        rows = [f"    slot {slot}  {line.rstrip()}" for slot, line in enumerate(self.lines)]
        return "\n".join([*rows, "", f"    {self.figures()}"])

    def figures(self) -> str:
        first = [steps[0] + 1 - CROWD[letter][0] for letter, steps in self.tokens.items()]
        gaps = [b - a for s in self.tokens.values() for a, b in pairwise(s)]
        return (
            f"{self.steps} steps, {self.plans} plans; first token after "
            f"{sum(first) / len(first):.1f} steps, {max(first)} at most; "
            f"longest gap {max(gaps)}"
        )


def drawn(page: str, mode: str) -> str:
    found = re.search(rf"<!-- {mode}:begin -->\n(.*?)\n<!-- {mode}:end -->", page, re.DOTALL)
    assert found is not None, mode
    return found[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_does_what_is_drawn(mode: str, request: pytest.FixtureRequest) -> None:
    page, text = PAGE.read_text(), Drawing(mode).text()
    if request.config.getoption("--rewrite"):
        begin, end = f"<!-- {mode}:begin -->\n", f"\n<!-- {mode}:end -->"
        page = page.replace(begin + drawn(page, mode) + end, begin + text + end)
        PAGE.write_text(page)
    assert drawn(page, mode) == text


def test_the_page_has_every_rule_preset_and_knob() -> None:
    page = PAGE.read_text()
    for table in TABLES.values():
        for name in table:
            assert f"`{name}" in page, name
    for name, preset in PRESETS.items():
        assert not name or f"| `{name}` |" in page, name
        assert not name or preset.why in page, name
    for name in SchedulingSettings.model_fields:
        assert f"`--{name.replace('_', '-')}" in page, name
