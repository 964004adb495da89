"""How much of the room that a gap leaves beside live rows the lines of a batch have used, by the
archive of the run.

Its decisions are made again, and what a step took is compared with what steps of as many live rows
took while there were no lines. Counted are steps in which live rows decode, none of their prompts
is computed, a line waits and a slot is free for it: what such a step may take besides is the room,
and a step that is longer than the gap does not make up for a shorter one. Where slots are all
taken, they and not the gap say how long a step is: `slots_taken` is how many of the steps are so.
"""

from collections import defaultdict
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from ledger.archive.reader import entries
from scheduler_svc.core.commands import Command, MakePlan, StepDone, Submit
from scheduler_svc.core.outcome import Outcome
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import SequenceId
from scheduler_svc.replay import Skipped, replay_archive


class Steps:
    """Those in which live rows decode, by how many of them there are, and what each took."""

    def __init__(self) -> None:
        self.alone: dict[int, list[int]] = defaultdict(list)
        self.beside: list[tuple[int, int]] = []
        self.slots_taken = 0
        self._live: set[SequenceId] = set()
        # Plans whose first step has prompt tokens of live requests.
        self._prompts: set[tuple[str, int]] = set()

    def told(self, command: Command, outcome: Outcome, _now_ns: int, core: Scheduler) -> None:
        match command:
            case Submit(request=request) if not request.is_flex:
                self._live.update(range(request.sequence_id, request.sequence_id + request.n))
            case MakePlan() if outcome.plan is not None:
                plan, running = outcome.plan, core.workers[command.worker_id].running
                if any(count and not running[slot].is_flex for slot, count in plan.chunks):
                    self._prompts.add((plan.worker_id, plan.plan_id))
            case StepDone(result=result) if outcome.tokens is not None:
                if result.step == 0 and (result.worker_id, result.plan_id) in self._prompts:
                    return
                live = len(self._live.intersection(outcome.tokens.sequence_ids))
                worker = core.workers[result.worker_id]
                if live and not worker.flex and not core.waiting:
                    self.alone[live].append(result.step_us)
                elif live and core.waiting.num_admissible:
                    self.slots_taken += not worker.slots_free
                    if worker.slots_free:
                        self.beside.append((live, result.step_us))

    def figures(self, gap_us: int) -> dict[str, Any]:
        """Of the room that steps had, the part that was used; None: they had none."""
        alone_us = {live: round(median(each)) for live, each in self.alone.items()}
        room_us = used_us = 0
        for live, step_us in self.beside:
            if live in alone_us:
                room = max(0, gap_us - alone_us[live])
                room_us, used_us = room_us + room, used_us + min(room, step_us - alone_us[live])
        return {
            "steps": len(self.beside),
            "slots_taken": self.slots_taken,
            "alone_ms": {live: us / 1000 for live, us in sorted(alone_us.items())},
            "step_ms": _spread([step_us for _, step_us in self.beside]),
            "room_used": round(used_us / room_us, 3) if room_us else None,
        }


def room(folder: Path, gap_ms: float) -> dict[str, Any]:
    """Of the archive in this folder, whose scheduler has ended."""
    steps, skipped = Steps(), list[str]()
    for found in replay_archive(entries([folder]), told=steps.told):
        if isinstance(found, Skipped):
            skipped.append(found.why)
    return steps.figures(round(1000 * gap_ms)) | {"skipped": skipped}


def _spread(step_us: list[int]) -> dict[str, float]:
    if len(step_us) < 2:
        return {}
    parts = quantiles(step_us, n=100)
    return {"p50": round(parts[49] / 1000, 2), "p99": round(parts[98] / 1000, 2)}
