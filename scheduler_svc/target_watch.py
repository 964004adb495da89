"""Whether workers can meet `--itl-target-ms`, and whether `--batch-gap-ms` leaves batches any room:
said in a sentence when it shows, and once.

Chunks of prompts get smaller towards a target, but no smaller than `--prefill-tokens-min`, and the
rows that decode take what they take. Pure: what was said is remembered here.
"""

from collections.abc import Iterable, Iterator

from scheduler_svc.core.planner.share import num_decodes
from scheduler_svc.core.types import Config
from scheduler_svc.core.workers import Worker

# Of the target: what takes less is met again, so that a step at the edge is not told every time.
MET_PERCENT = 90


class TargetWatch:
    """One leader's."""

    def __init__(self) -> None:
        self._missing: set[str] = set()
        self._full: set[str] = set()

    def look(self, config: Config, workers: Iterable[Worker]) -> Iterator[tuple[str, str]]:
        """Workers that have begun to miss the target, and why they cannot but miss it."""
        if (target_us := config.itl_target_us) is None:
            return
        for worker in workers:
            live, flex = num_decodes(worker)
            # Those that keep a gap would sit out.
            decodes = live + (flex if config.batch_gap_us is None else 0)
            decode_us = worker.cost.decode_us(decodes)
            least_us = decode_us + worker.cost.prefill_us(config.prefill_tokens_min)
            if not decodes or least_us * 100 <= target_us * MET_PERCENT:
                self._missing.discard(worker.id)
            elif least_us > target_us and worker.id not in self._missing:
                self._missing.add(worker.id)
                yield worker.id, _why(config, decodes, decode_us, least_us)

    def look_at_gap(
        self, config: Config, workers: Iterable[Worker], *, flex_waits: bool
    ) -> Iterator[tuple[str, str]]:
        """Workers whose live rows have begun to take the gap of flex requests by themselves, while
        some of those wait: they will for as long as it stays so.
        """
        if (gap_us := config.batch_gap_us) is None:
            return
        for worker in workers:
            live, flex = num_decodes(worker)
            live_us = worker.cost.decode_us(live)
            if not live or live_us * 100 <= gap_us * MET_PERCENT:
                self._full.discard(worker.id)
            elif live_us > gap_us and flex_waits and not flex and worker.id not in self._full:
                self._full.add(worker.id)
                yield worker.id, _why_no_room(gap_us, live, live_us)


def _why_no_room(gap_us: int, live: int, live_us: int) -> str:
    return (
        f"--batch-gap-ms {gap_us / 1000:g} leaves batches no room: a step of {live} live rows "
        f"takes {live_us / 1000:.1f} ms by itself; lines wait until there are fewer; or give a "
        f"larger gap"
    )


def _why(config: Config, decodes: int, decode_us: int, least_us: int) -> str:
    target_ms = (config.itl_target_us or 0) / 1000
    if decode_us > target_ms * 1000:
        return (
            f"--itl-target-ms {target_ms:g} cannot be met: a step of {decodes} rows takes "
            f"{decode_us / 1000:.1f} ms without any prompt; give the worker fewer slots, or a "
            f"higher target"
        )
    return (
        f"--itl-target-ms {target_ms:g} cannot be met: a step of {decodes} rows takes "
        f"{least_us / 1000:.1f} ms with the {config.prefill_tokens_min} prompt tokens that a "
        f"prefill gets at least; lower --prefill-tokens-min, give the worker fewer slots, or a "
        f"higher target"
    )
