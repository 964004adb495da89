"""plan_reference: the definition of correct of `plan`, row by row on the host.

formula  as in plan
shapes   as in plan
cost     Python's, of each task: for tests, and to count what programs are given
"""

from __future__ import annotations

from torch import Tensor

from kernels.attention import plan

# As a line of the table.
Task = tuple[int, int, int, int, int, int, int, int]


def attention_plan_reference(
    query_starts: Tensor, context_lengths: Tensor, short_tokens: int, long_tokens: int,
    tasks_wanted: int | None = None,
) -> tuple[list[Task], list[Task], list[int], list[int]]:  # fmt: skip
    """The definition of correct, for tokens of one tile: tasks and parts, short and long. Without
    short tokens every row is long.
    """
    shorts: list[tuple[int, Task]] = []
    longs: list[Task] = []
    short_kept, long_kept = [0], [0]
    contexts, starts = context_lengths.tolist(), query_starts.tolist()
    live = (each for at, each in enumerate(contexts) if each and starts[at] < starts[at + 1])
    span = task_splits(sum(map(short_splits, live)), tasks_wanted)
    for row, (begin, context) in enumerate(zip(starts, contexts, strict=False)):
        count = starts[row + 1] - begin
        is_live, level = count > 0 and context > 0, short_level(context)
        splits = short_splits(context)
        is_few = count == 1 or count * splits <= plan.PARTS_MAX
        is_short = is_few and count <= short_tokens
        # As many splits a task as its row's fewest tasks need.
        each = -(-splits // -(-splits // span))
        for split in range(0, splits if is_live and is_short else 0, each):
            start, is_end = split << level, split + each >= splits
            length = context - start * plan.SPLIT if is_end else each * plan.SPLIT << level
            kept = short_kept[-1] + split * count
            task = (row, begin, count, context, 0, kept, start, (each + is_end) << level)
            shorts.append((-length, task))
        splits_long = plan.long_splits(context)
        for tile in range(-(-count // long_tokens) if is_live and not is_short else 0):
            for split in range(splits_long):
                start, kept = long_start(split), long_kept[-1] + split * count
                size = long_start(split + 1) - start
                longs.append((row, begin, count, context, tile * long_tokens, kept, start, size))
        short_kept.append(short_kept[-1] + count * splits * (is_live and is_short and splits > 1))
        is_kept = is_live and not is_short and splits_long > 1
        long_kept.append(long_kept[-1] + count * splits_long * is_kept)
    # Of those of one length whole splits are taken before ends of rows.
    shorts.sort(key=lambda each: (each[0], _is_end(each[1])))
    return [task for _, task in reversed(shorts)], longs, short_kept, long_kept


def task_splits(splits: int, tasks_wanted: int | None) -> int:
    """How many splits a task has at most, of a step of so many: about `tasks_wanted` tasks are
    left. None: one.
    """
    if tasks_wanted is None:
        return 1
    return max(1, min(plan.TASK_SPLITS, (2 * splits + tasks_wanted) // (2 * tasks_wanted)))


def _is_end(task: Task) -> bool:
    _, _, _, context, _, _, start, size = task
    return (start + size) * plan.SPLIT >= context


def short_level(context: int) -> int:
    """Splits of a short row are of SPLIT << level positions."""
    few = max(3, plan.PARTS_MAX // 8)
    # A few rows fill a GPU by short splits; longer ones have enough of them, with half the parts.
    is_long = context >= (2 * few + 1) * (plan.SPLIT // 2)
    return max(is_long, (context // ((2 * plan.PARTS_MAX + 1) * (plan.SPLIT // 2))).bit_length())


def short_splits(context: int) -> int:
    """Splits of a short row."""
    size = plan.SPLIT << short_level(context)
    return max(1, (context + size // 2) // size)


def long_start(split: int) -> int:
    """In units of LONG_SPLIT."""
    alike = plan.LONG_ALIKE
    return ((alike + split % alike) << (split // alike)) - alike
