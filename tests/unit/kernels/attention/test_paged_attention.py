import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import native
from kernels.attention.paged_attention import paged_attention, paged_attention_reference
from tests.unit.kernels.paged_cases import PagedCase, dense_attention, paged_case


def excess_of(case: PagedCase) -> float:
    """Of the kernel over what arithmetic allows: above 1 is wrong."""
    result = paged_attention(*case.arguments(), **case.options())
    assert result.shape == case.q.shape
    assert result.dtype == case.q.dtype
    # The compiled path may round weights where keys and values are bfloat16; torch's never does.
    weights = case.q.dtype if native.path_for(case.q) == "native" else torch.float32
    return dense_attention(case, weights).excess(result)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 2), (6, 2), (4, 1), (14, 2)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128])
def test_heads_and_sizes(
    path: str,
    generator: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    case = paged_case(
        generator,
        counts=[1, 3, 1],
        contexts=[1, 19, 33],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    assert excess_of(case) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [1, 15, 16, 17, 31, 32, 33, 511, 512, 513])
def test_block_and_split_borders(
    path: str, generator: torch.Generator, dtype: torch.dtype, context: int
) -> None:
    case = paged_case(
        generator, counts=[1, min(context, 5)], contexts=[context, context], dtype=dtype
    )
    assert excess_of(case) <= 1.0


@pytest.mark.parametrize("head_dim", [24, 96, 256, 264])
@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_odd_blocks_and_wide_heads(
    path: str, generator: torch.Generator, head_dim: int, block_size: int
) -> None:
    case = paged_case(
        generator, counts=[2, 0, 9], contexts=[40, 3, 9], head_dim=head_dim, block_size=block_size
    )
    assert excess_of(case) <= 1.0


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=6),
    block_size=st.sampled_from([4, 16]),
    seed=st.integers(0, 2**31),
)
def test_ragged_steps(path: str, rows: list[tuple[int, int]], block_size: int, seed: int) -> None:
    case = paged_case(
        torch.Generator().manual_seed(seed),
        counts=[count for count, _ in rows],
        contexts=[count + done for count, done in rows],
        block_size=block_size,
    )
    assert excess_of(case) <= 1.0


def in_chunks(case: PagedCase, chunk: int) -> torch.Tensor:
    """The single row of `case` computed `chunk` query tokens at a time."""
    count, context = case.q.size(0), int(case.context_lengths[0])
    parts = []
    for start in range(0, count, chunk):
        end = min(count, start + chunk)
        step = dataclasses.replace(
            case,
            q=case.q[start:end],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lengths=torch.tensor([context - count + end], dtype=torch.int32),
        )
        parts.append(paged_attention(*step.arguments(), **step.options()))
    return torch.cat(parts)


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 64), (6, 64), (8, 80), (14, 32)])
def test_bits_do_not_depend_on_chunks(
    path: str, generator: torch.Generator, dtype: torch.dtype, heads: int, head_dim: int
) -> None:
    case = paged_case(
        generator,
        counts=[550],
        contexts=[560],
        heads=heads,
        kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
    )
    whole = paged_attention(*case.arguments())
    for chunk in (1, 7, 16, 64):
        assert torch.equal(in_chunks(case, chunk), whole), f"chunks of {chunk}"


# Splits of 512 positions are items of their own for few queries, else one after another in one.
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    done=st.sampled_from([0, 5, 500, 1020, 1030]),
    count=st.integers(2, 70),
    cut=st.integers(1, 69),
    group=st.sampled_from([1, 3, 7]),
    block_size=st.sampled_from([5, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_bits_do_not_depend_on_where_a_row_is_cut(
    path: str,
    done: int,
    count: int,
    cut: int,
    group: int,
    block_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    if path == "torch":
        # What differs there is below float64's last bits, of which bfloat16 shows none.
        dtype = torch.bfloat16
    case = paged_case(
        torch.Generator().manual_seed(seed),
        counts=[count],
        contexts=[done + count],
        heads=2 * group,
        kv_heads=2,
        block_size=block_size,
        dtype=dtype,
    )
    assert excess_of(case) <= 1.0
    whole = paged_attention(*case.arguments())
    assert torch.equal(in_chunks(case, min(cut, count)), whole)
    assert torch.equal(in_chunks(case, 1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 512, 513, 700, 5000])
@pytest.mark.parametrize("block_size", [5, 16])
def test_nobody_sees_behind_a_window(
    path: str, generator: torch.Generator, dtype: torch.dtype, window: int, block_size: int
) -> None:
    """Nor are the blocks behind it touched, which may be another's by then."""
    case = paged_case(
        generator,
        counts=[1, 40, 1, 7, 1],
        contexts=[1300, 700, 63, 1030, 1],
        heads=6,
        block_size=block_size,
        dtype=dtype,
        window=window,
    )
    assert excess_of(case) <= 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("softcap", [0.1, 5.0, 50.0])
def test_scores_are_capped(
    path: str, generator: torch.Generator, dtype: torch.dtype, window: int | None, softcap: float
) -> None:
    case = paged_case(
        generator, counts=[1, 9], contexts=[600, 40], dtype=dtype, window=window, softcap=softcap
    )
    # Scores far beyond the cap, of either sign.
    case = dataclasses.replace(case, q=case.q * 20)
    assert excess_of(case) <= 1.0


@pytest.mark.parametrize("path", ["native"], indirect=True)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    done=st.sampled_from([0, 5, 500, 1020, 1030]),
    count=st.integers(2, 70),
    cut=st.integers(1, 69),
    window=st.sampled_from([1, 16, 40, 512, 600]),
    softcap=st.sampled_from([None, 5.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_bits_behind_a_window_do_not_depend_on_where_a_row_is_cut(
    path: str,
    done: int,
    count: int,
    cut: int,
    window: int,
    softcap: float | None,
    dtype: torch.dtype,
    seed: int,
) -> None:
    case = paged_case(
        torch.Generator().manual_seed(seed),
        counts=[count],
        contexts=[done + count],
        dtype=dtype,
        window=window,
        softcap=softcap,
    )
    whole = paged_attention(*case.arguments(), **case.options())
    assert torch.equal(in_chunks(case, min(cut, count)), whole)
    assert torch.equal(in_chunks(case, 1), whole)


@pytest.mark.parametrize("options", [{"window": 0}, {"softcap": 0.0}])
def test_bad_options_are_named(
    path: str, generator: torch.Generator, options: dict[str, Any]
) -> None:
    case = paged_case(generator, counts=[1], contexts=[5], **options)
    (field,) = options
    with pytest.raises(ValueError, match=rf"^{field}: "):
        paged_attention(*case.arguments(), **case.options())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_batch_mates_or_threads(
    path: str, generator: torch.Generator, dtype: torch.dtype
) -> None:
    counts, contexts = [1, 30, 1, 7, 1], [600, 30, 17, 1100, 1]
    case = paged_case(generator, counts=counts, contexts=contexts, heads=6, dtype=dtype)
    together = paged_attention(*case.arguments())
    # How torch's matrix library shares sums out is its own affair.
    for threads_used in (1, 2, 3) if path == "native" else (1,):
        torch.set_num_threads(threads_used)
        assert torch.equal(paged_attention(*case.arguments()), together)
    for row in range(len(counts)):
        start, end = int(case.query_starts[row]), int(case.query_starts[row + 1])
        alone = dataclasses.replace(
            case,
            q=case.q[start:end],
            block_tables=case.block_tables[row : row + 1],
            query_starts=torch.tensor([0, end - start], dtype=torch.int32),
            context_lengths=case.context_lengths[row : row + 1],
        )
        assert torch.equal(paged_attention(*alone.arguments()), together[start:end])


def test_a_poisoned_row_stays_alone(path: str, generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1, 2, 1], contexts=[20, 20, 20])
    clean = paged_attention(*case.arguments())
    case.v_pages[int(case.block_tables[1, 0])] = float("nan")
    poisoned = paged_attention(*case.arguments())
    assert poisoned[1:3].isnan().all()
    assert torch.equal(poisoned[0], clean[0])
    assert torch.equal(poisoned[3], clean[3])


def test_queries_may_be_a_view_of_fused_qkv(path: str, generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[3, 1], contexts=[18, 5])
    fused = torch.zeros(4, 4 * 32 + 77)
    fused[:, : 4 * 32] = case.q.flatten(1)
    view = fused[:, : 4 * 32].view(4, 4, 32)
    result = paged_attention(*dataclasses.replace(case, q=view).arguments())
    assert torch.equal(result, paged_attention(*case.arguments()))


def test_no_rows(path: str, generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[], contexts=[])
    assert paged_attention(*case.arguments()).shape == (0, 4, 32)


@pytest.mark.parametrize("path", ["native"], indirect=True)
def test_ids_outside_the_pool_are_refused(path: str, generator: torch.Generator) -> None:
    case = paged_case(generator, counts=[1], contexts=[40])
    case.block_tables[0, 1] = case.k_pages.size(0)
    with pytest.raises(IndexError, match="block_tables"):
        paged_attention(*case.arguments())
    case.block_tables[0, 1] = -1
    with pytest.raises(IndexError, match="block_tables"):
        paged_attention(*case.arguments())
    case.context_lengths[0] = 1000
    with pytest.raises(IndexError, match="context_lengths"):
        paged_attention(*case.arguments())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("q", lambda t: t.double()),
        ("q", lambda t: t[..., :16]),
        ("q", lambda t: t[:, :3]),
        ("q", lambda t: t.bfloat16()),
        ("k_pages", lambda t: t.transpose(1, 2)),
        ("v_pages", lambda t: t[:, :, :8]),
        ("block_tables", lambda t: t.long()),
        ("block_tables", lambda t: t[:1]),
        ("query_starts", lambda t: t[:-1]),
        ("query_starts", lambda t: t.long()),
        ("context_lengths", lambda t: t.long()),
    ],
)
def test_bad_arguments_are_named(
    path: str, generator: torch.Generator, field: str, change: object
) -> None:
    case = paged_case(generator, counts=[1, 2], contexts=[5, 9])
    assert callable(change)
    broken = dataclasses.replace(case, **{field: change(getattr(case, field))})
    with pytest.raises(ValueError, match=rf"^{field}: "):
        paged_attention(*broken.arguments())


def test_the_compiled_path_is_taken(is_compiled: bool, generator: torch.Generator) -> None:
    if not is_compiled:
        pytest.skip(native.reason())
    case = paged_case(generator, counts=[5], contexts=[300])
    native.build()
    assert native.path_for(case.q) == "native"
    compiled = paged_attention(*case.arguments())
    # Other sums than torch's: the same bits would say that torch computed them.
    assert not torch.equal(compiled, paged_attention_reference(*case.arguments()))
