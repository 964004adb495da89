"""What is shown of a live core: rows of texts, made of what `Watch` told. Pure.

`kaiten top` and `kaiten ps` show the same.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

from kaiten.cli.live.reasons import reason, states_of, takes_more, trouble, why_behind
from kaiten.client.live_core import NO_BLOCK, LiveCore, LiveSequence
from kaiten.v1.watch_pb2 import SequenceState, WatchedWorker, WatchResponse

BAR: Final = 12
UNIX: Final = "unix:"
# How a block looks: held by one sequence, by several, by nobody. A cell of a map stands for as many
# blocks as it has to.
HELD, SHARED, FREE = "█", "▓", "·"
MAP_CELLS_MAX: Final = 2048
# In the order in which people ask.
STATES: Final = ("running", "retiring", "waiting", "preempted", "forking")

# One line of a table.
Row = tuple[str, ...]


class Choice(NamedTuple):
    """One sequence: a choice of a request."""

    id: str
    tenant: str
    choice: int
    state: str
    worker: str
    worker_id: str
    slot: int
    prompt_tokens: int
    tokens: int
    computed_tokens: int
    tokens_max: int
    age_s: float
    preemptions: int
    # Its place in the queue, from 1; 0: it stands in none.
    position: int
    why: str

    @property
    def name(self) -> str:
        """As people write it; of a request with one choice, the request's id."""
        return f"{self.id}/{self.choice}" if self.choice else self.id


class Rates(NamedTuple):
    """Of all workers together, since the response before."""

    tokens_per_s: float
    records_per_s: float


NO_RATES: Final = Rates(0.0, 0.0)


def state_of(one: LiveSequence) -> str:
    number = one.place.state
    # Newer services than this command may know more of them.
    name = SequenceState.Name(number) if number in SequenceState.values() else f"state {number}"
    return name.removeprefix("SEQUENCE_STATE_").lower()


def name_of(core: LiveCore, worker_id: str) -> str:
    """Its address; of a socket the name, unless another has the same in another folder."""
    worker = core.workers.get(worker_id)
    if worker is None or not worker.address:
        return worker_id
    names = Counter(_socket(each.address) for each in core.workers.values())
    name = _socket(worker.address)
    return name if names[name] == 1 else worker.address


def full_name_of(core: LiveCore, worker_id: str) -> str:
    """With its id, as logs, metrics and archives have it: all that is known of one that is gone."""
    name = name_of(core, worker_id)
    return name if name == worker_id else f"{name} ({worker_id})"


def _socket(address: str) -> str:
    return PurePath(address).stem if address.startswith(UNIX) else address


def choices(core: LiveCore) -> Iterator[Choice]:
    """Who runs, by worker and slot; then who waits, in order; then all others."""
    positions = {sequence_id: number for number, sequence_id in enumerate(core.queue, start=1)}

    def order(item: tuple[int, LiveSequence]) -> tuple[int, str, int, int]:
        sequence_id, one = item
        state, last = state_of(one), len(core.sequences)
        where = name_of(core, one.place.worker_id), one.place.slot
        if state in ("running", "retiring"):
            return (STATES.index(state), *where, sequence_id)
        return len(STATES), "", positions.get(sequence_id, last), sequence_id

    for sequence_id, one in sorted(core.sequences.items(), key=order):
        yield _choice(core, one, positions.get(sequence_id, 0))


def _choice(core: LiveCore, one: LiveSequence, position: int) -> Choice:
    identity, place, counts = one.identity, one.place, one.counts
    tenant, _, request_id = identity.id.partition(":")
    age_ns = max(0, core.unix_ns - identity.arrived_ns) if identity.arrived_ns else 0
    reasons = dict.fromkeys(
        f"{name_of(core, over.worker_id)}: {reason(over)}"
        if over.worker_id and len(core.workers) > 1
        else reason(over)
        for over in one.passed_over
    )
    is_here = state_of(one) in ("running", "retiring")
    return Choice(
        id=request_id,
        tenant=tenant,
        choice=identity.choice,
        state=state_of(one),
        worker=name_of(core, place.worker_id) if place.worker_id else "",
        worker_id=place.worker_id,
        slot=place.slot,
        prompt_tokens=identity.num_prompt_tokens,
        tokens=counts.num_tokens,
        computed_tokens=counts.num_computed_tokens,
        tokens_max=identity.tokens_max,
        age_s=age_ns / 1e9,
        preemptions=place.num_preemptions,
        position=position,
        why="" if is_here else "; ".join(reasons) or why_behind(core, one, position),
    )


def rates(before: WatchResponse | None, now: WatchResponse) -> Rates:
    """Between two responses of one leader; steps that are not told were like those that are."""
    if before is None or before.epoch != now.epoch or now.unix_ns <= before.unix_ns:
        return NO_RATES
    seconds = (now.unix_ns - before.unix_ns) / 1e9
    steps = [step for some in now.steps for step in some.steps]
    tokens, skipped = sum(s.num_tokens for s in steps), sum(some.num_skipped for some in now.steps)
    share = len(steps) / (len(steps) + skipped) if steps else 1.0
    return Rates(tokens / share / seconds, (now.seq - before.seq) / seconds)


def headline(core: LiveCore, rate: Rates) -> str:
    """The cell in a line."""
    workers = core.workers.values()
    blocks, free = sum(w.block_count for w in workers), sum(w.blocks_free for w in workers)
    running = sum(state_of(one) == "running" for one in core.sequences.values())
    slots = sum(worker.slots_max for worker in workers)
    share = f"{100 * (blocks - free) / blocks:.0f} %" if blocks else "none"
    return (
        f"leader {core.epoch}  {core.configured.policy}  {running}/{slots} running  "
        f"{core.waiting} waiting  KV {share}  {rate.tokens_per_s:.0f} tokens/s  "
        f"{rate.records_per_s:.0f} records/s, {core.seq - core.committed_seq} uncommitted"
        + (f"  {why}" if (why := trouble(core)) else "")
    )


WORKER_COLUMNS: Final = ("worker", "slots", "", "KV blocks", "", "plans", "state", "id")


def worker_rows(core: LiveCore) -> Iterator[Row]:
    """Of each worker how full it is, and why nobody joins it."""
    by_worker = Counter(
        one.place.worker_id for one in core.sequences.values() if state_of(one) == "running"
    )
    for worker in core.workers.values():
        used, held = by_worker[worker.worker_id], worker.block_count - worker.blocks_free
        yield (
            name_of(core, worker.worker_id),
            f"{used}/{worker.slots_max}",
            bar(used, worker.slots_max),
            f"{held}/{worker.block_count}"
            + (f" +{worker.host_blocks_used} host" if worker.host_block_count else ""),
            bar(held, worker.block_count),
            ", ".join(f"{p.plan_id}: {p.steps_answered}/{p.lease_steps}" for p in worker.plans),
            ", ".join(["takes more"] * takes_more(worker) + states_of(worker)),
            worker.worker_id,
        )


RUNNING_COLUMNS: Final = ("slot", "request", "tenant", "worker", "tokens", "", "age", "preempted")


def running_rows(some: Iterable[Choice]) -> Iterator[Row]:
    """Who is in a batch."""
    for one in some:
        if one.state not in ("running", "retiring"):
            continue
        yield (
            str(one.slot) if one.state == "running" else "-",
            one.name,
            one.tenant,
            one.worker,
            f"{one.tokens}/{one.tokens_max}",
            bar(one.tokens, one.tokens_max, one.computed_tokens),
            age(one.age_s),
            str(one.preemptions or ""),
        )


QUEUE_COLUMNS: Final = ("place", "request", "tenant", "state", "tokens", "age", "why it waits")


def queue_rows(some: Iterable[Choice]) -> Iterator[Row]:
    """Who waits, and why."""
    for one in some:
        if one.state in ("running", "retiring"):
            continue
        yield (
            str(one.position or "-"),
            one.name,
            one.tenant,
            one.state,
            f"{one.tokens}/{one.tokens_max}",
            age(one.age_s),
            one.why,
        )


def block_map(core: LiveCore, worker: WatchedWorker, width: int) -> str:
    """The KV pool of a worker, as lines: one sign for a block, or for several."""
    owners = Counter(
        block
        for one in core.sequences.values()
        if one.place.worker_id == worker.worker_id
        for table in one.tables
        for block in table
        if block != NO_BLOCK
    )
    each = max(1, -(-worker.block_count // MAP_CELLS_MAX))
    signs = [_sign(owners, range(at, at + each)) for at in range(0, worker.block_count, each)]
    lines = ["".join(signs[at : at + width]) for at in range(0, len(signs), max(1, width))]
    scale = f"  one sign: {each} blocks" if each > 1 else ""
    named = name_of(core, worker.worker_id)
    return "\n".join([f"{named}  {HELD} held  {SHARED} shared  {FREE} free{scale}", *lines])


def _sign(owners: Counter[int], blocks: Sequence[int]) -> str:
    most = max(owners[block] for block in blocks)
    return FREE if not most else SHARED if most > 1 else HELD


def bar(part: int, whole: int, sure: int | None = None) -> str:
    """`sure` of the part is drawn full, the rest of it light."""
    filled = min(BAR, round(BAR * part / whole)) if whole else 0
    full = filled if sure is None else min(filled, round(BAR * sure / whole) if whole else 0)
    return ("█" * full + "▒" * (filled - full)).ljust(BAR, "·")


def age(seconds: float) -> str:
    """Short."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
