"""Runs a scenario: commands in, one line out for everything that the core decided.

A file is prose (`#`), and blocks of commands, a line `----`, and the outcome up to an empty line.

    cell KEY=N…            settings of the core: lease, in_flight, prefill_tokens, policy
    worker NAME KEY=N…     a worker joins: blocks, block_size, slots, step_tokens
    submit NAME prompt=N output=N [n=N] [tenant=T] [like=NAME]
    plan WORKER            one plan, sent to the worker
    step WORKER            one step of the worker, committed
    turns N                plans that are due and a step for each worker, N times
    until NAME starts|ends the same, until it does
    cancel NAME · kill WORKER · goodbye WORKER · bad NAME (its logits will not be finite)
    state                  who runs, who waits, blocks free
    finish                 turns until nothing lives; every output is checked
"""

from collections.abc import Callable, Iterator
from typing import Any

from scheduler_svc.core.outcome import Plan, StepTokens
from tests.support.cell import Cell, spec

TURNS_MAX = 1000


def run_text(text: str) -> str:
    """The same text with the outcomes that really happen."""
    script = Script()
    return "\n".join(line for block in text.split("\n\n") for line in script.run_block(block))


class Script:
    """One cell and names for its requests."""

    def __init__(self) -> None:
        self.cell = Cell()
        self.sequence_id_of: dict[str, int] = {}
        self.name_of: dict[int, str] = {}
        self.ended: set[int] = set()
        self.steps = 0

    def run_block(self, block: str) -> Iterator[str]:
        if not block.strip():
            return
        lines = block.strip("\n").split("\n")
        yield from (line for line in lines if line.startswith("#"))
        commands = [line for line in lines if not line.startswith("#")]
        if commands:
            commands = commands[: commands.index("----")]
            yield from commands
            yield "----"
            for command in commands:
                yield from self.run(command)
        yield ""

    def run(self, command: str) -> Iterator[str]:
        name, *words = command.split()
        keys = dict(word.split("=") for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        method: Callable[..., Iterator[str]] = getattr(self, f"do_{name}")
        yield from method(*plain, **{key: number_or_text(text) for key, text in keys.items()})
        yield from self._endings()

    # Commands

    def do_cell(self, **settings: Any) -> Iterator[str]:
        self.cell = Cell(**settings)
        yield from ()

    def do_worker(self, name: str, **size: Any) -> Iterator[str]:
        self.cell.join(name, spec(**size))
        yield from ()

    def do_submit(
        self,
        name: str,
        prompt: int = 0,
        output: int = 1,
        n: int = 1,
        tenant: str = "",
        like: str = "",
    ) -> Iterator[str]:
        tokens = self.cell.requests[self.sequence_id_of[like]].prompt if like else prompt
        sequence_id = self.cell.submit(tokens, output, n=n, tenant=tenant)
        self.sequence_id_of[name] = sequence_id
        for choice in range(n):
            self.name_of[sequence_id + choice] = f"{name}.{choice}" if n > 1 else name
        yield from ()

    def do_plan(self, worker: str) -> Iterator[str]:
        plan = self.cell.plan(worker)
        yield f"{worker}: no plan is due" if plan is None else self._plan(plan)

    def do_step(self, worker: str) -> Iterator[str]:
        result = self.cell.compute(worker)
        committed = self.cell.commit(result)
        yield f"{worker} #{result.plan_id}.{result.step}: {self._tokens(committed)}"

    def do_turns(self, count: str) -> Iterator[str]:
        for _ in range(int(count)):
            yield from self._turn()

    def do_until(self, name: str, event: str) -> Iterator[str]:
        sequence_id, turns = self.sequence_id_of[name], 0
        while not self._has(event, sequence_id):
            yield from self._turn()
            turns += 1
            assert turns < TURNS_MAX, f"{name} never {event}"
        yield f"after {turns} turns"

    def do_cancel(self, name: str) -> Iterator[str]:
        self.cell.cancel(self.sequence_id_of[name])
        yield from ()

    def do_kill(self, worker: str) -> Iterator[str]:
        self.cell.kill(worker)
        yield from ()

    def do_goodbye(self, worker: str) -> Iterator[str]:
        self.cell.kill(worker, is_crash=False)
        yield from ()

    def do_bad(self, name: str) -> Iterator[str]:
        self.cell.bad_sequence_ids.add(self.sequence_id_of[name])
        yield from ()

    def do_state(self) -> Iterator[str]:
        for worker_id in self.cell.workers:
            worker = self.cell.worker(worker_id)
            rows = ", ".join(
                f"{slot}={self.name_of[s.sequence_id]} {s.num_computed_tokens}/{len(s.tokens)}"
                for slot, s in sorted(worker.running.items())
            )
            yield f"{worker_id}: {rows or 'idle'}; {worker.kv.free_count} blocks free"
        yield f"waiting: {self._names(self.cell.waiting()) or 'nobody'}"

    def do_finish(self) -> Iterator[str]:
        while self.cell.scheduler.live_count:
            yield from self._turn()
        self.cell.finish()
        steps = sum(worker.steps_total for worker in self.cell.workers.values())
        yield f"all outputs right, nothing held, {steps} steps by the workers that are left"

    # Outcomes

    def _turn(self) -> Iterator[str]:
        for plan in self.cell.turn():
            if plan.joins or plan.leaves or plan.preempted:
                yield self._plan(plan)
        yield from self._endings()

    def _has(self, event: str, sequence_id: int) -> bool:
        if event == "ends":
            return sequence_id in self.cell.endings
        assert event == "starts"
        return any(sequence_id in self.cell.running(worker_id) for worker_id in self.cell.workers)

    def _endings(self) -> Iterator[str]:
        for sequence_id, ending in self.cell.endings.items():
            if sequence_id not in self.ended:
                self.ended.add(sequence_id)
                why = f" ({ending.error})" if ending.error else ""
                tokens = f"{ending.num_output_tokens} tokens"
                yield f"  {self.name_of[sequence_id]} ends: {ending.reason.value}, {tokens}{why}"

    def _plan(self, plan: Plan) -> str:
        parts = [f"{plan.worker_id} #{plan.plan_id} lease {plan.lease_steps}"]
        if plan.preempted:
            parts.append(f"preempt {self._names(plan.preempted)}")
        if plan.leaves:
            parts.append(f"leave {' '.join(map(str, plan.leaves))}")
        parts += [
            f"join {join.slot}={self.name_of[join.sequence_id]} done {join.num_computed_tokens}/"
            f"{len(join.tokens)} blocks {' '.join(map(str, join.block_tables[0][1]))}"
            for join in plan.joins
        ]
        parts += [f"append {slot}:{block}" for slot, block, _ in plan.appends]
        parts += [f"replace {slot}[{at}]:{block}" for slot, at, block, _ in plan.replacements]
        parts += [f"copy {source}>{target}" for source, target in plan.copies]
        parts += [f"chunk {slot}:{count}" for slot, count in plan.chunks]
        parts.append(f"decode {plan.decode_rows}")
        return " | ".join(parts)

    def _tokens(self, committed: StepTokens) -> str:
        rows = zip(committed.sequence_ids, committed.positions, strict=True)
        text = ", ".join(
            f"{self.name_of[sequence_id]}[{position}]" for sequence_id, position in rows
        )
        return text or "no tokens"

    def _names(self, sequence_ids: tuple[int, ...] | list[int]) -> str:
        return " ".join(self.name_of[sequence_id] for sequence_id in sequence_ids)


def number_or_text(text: str) -> int | str:
    return int(text) if text.isdigit() else text
