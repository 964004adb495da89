"""What goes over the wire between core and workers, drawn by hypothesis."""

from itertools import chain, repeat

from hypothesis import strategies as st

from scheduler_svc.core.outcome import Join, Plan
from scheduler_svc.core.types import Reason, StepResult

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SLOT = st.integers(0, 1023)
TOKEN = st.integers(0, 200_000)
NAMES = st.text(max_size=12)
ROW_REASON = st.sampled_from([Reason.STOP, Reason.LENGTH])
ROW_FAULT = st.sampled_from([Reason.ERROR, Reason.UNSATISFIABLE])


def sizes(maximum: int = 2**31) -> st.SearchStrategy[int]:
    return st.integers(1, maximum)


def pairs(
    left: st.SearchStrategy[int], right: st.SearchStrategy[int] = U32
) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    return st.lists(st.tuples(left, right), max_size=4).map(tuple)


def tokens_of(minimum: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(TOKEN, min_size=minimum, max_size=6).map(tuple)


joins = st.builds(
    Join,
    slot=SLOT,
    sequence_id=U64,
    tokens=tokens_of(1),
    num_prompt_tokens=U32,
    num_computed_tokens=U32,
    block_tables=st.lists(
        st.tuples(U32, st.lists(U32, max_size=4).map(tuple)), min_size=1, max_size=3
    ).map(tuple),
    prompt_logprobs_from=U32,
)


GROUP = st.sampled_from([0, 0, 1, 2])


plans = st.builds(
    Plan,
    worker_id=NAMES,
    plan_id=U64,
    lease_steps=sizes(64),
    leaves=st.lists(SLOT, max_size=4).map(tuple),
    joins=st.lists(joins, max_size=3).map(tuple),
    appends=st.lists(st.tuples(SLOT, U32, GROUP), max_size=4).map(tuple),
    replacements=st.lists(st.tuples(SLOT, U32, U32, GROUP), max_size=4).map(tuple),
    swaps=pairs(U32),
    copies=pairs(U32),
    chunks=pairs(SLOT, sizes(65536)),
    checksum=U64,
    preempted=st.lists(U64, max_size=3).map(tuple),
    decode_rows=U32,
    blocks_free=U32,
    waiting=U32,
)


@st.composite
def steps(draw: st.DrawFn) -> StepResult:
    rows = draw(st.dictionaries(SLOT, TOKEN, max_size=8))
    counts = draw(st.just(()) | st.just(tuple(1 + slot % 3 for slot in rows)))
    return StepResult(
        worker_id=draw(NAMES),
        plan_id=draw(U64),
        step=draw(U32),
        slots=tuple(rows),
        tokens=tuple(
            chain.from_iterable(map(repeat, rows.values(), counts or repeat(1, len(rows))))
        ),
        token_counts=counts,
        finished=draw(st.dictionaries(st.sampled_from(sorted(rows) or [0]), ROW_REASON)),
        errors=draw(st.dictionaries(SLOT, st.tuples(ROW_FAULT, NAMES), max_size=3)),
        prompt_logprobs=draw(
            st.dictionaries(SLOT, st.builds(range, U32, U32).filter(len), max_size=3)
        ),
        is_last=draw(st.booleans()),
    )
