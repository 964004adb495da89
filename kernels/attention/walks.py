"""walks: of a tile of queries, what a split of positions says to it; read tile by tile.

formula  as triton_kernels: top, total, sums over positions [start, stop). Two walks: `_walk`;
         `_walk_codes`, over fp8
shapes   queries [lines, dim_tile]; pages and tables as in paged_attention
cost     reads 2 * (stop - start) * head_dim elements of a KV head; 4 * lines * dim_tile
         multiply-adds per position
"""

from __future__ import annotations

from kernels import jit
from kernels.jit import constexpr, pointer, scalar, stride, tl
from kernels.kv import fp8


@jit.compiled
def places(
    table: pointer, at: scalar, is_there: pointer, kv_head: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
) -> pointer:  # fmt: skip
    """First elements of positions at, at + 1, ... in the pages; `at` is a multiple of POSITIONS.

    int64 from the block on: a pool may have more than 2^31 elements.
    """
    if BLOCK_SIZE % POSITIONS == 0:
        # One page holds them all, one after the other.
        block = tl.load(table + at // BLOCK_SIZE).to(tl.int64)
        first = (block * KV_HEADS + kv_head) * BLOCK_SIZE + at % BLOCK_SIZE
        place = first * HEAD_DIM + tl.arange(0, POSITIONS) * HEAD_DIM
    else:
        position = at + tl.arange(0, POSITIONS)
        block = tl.load(table + position // BLOCK_SIZE, mask=is_there, other=0).to(tl.int64)
        row = (block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
        place = row * HEAD_DIM
    return place


@jit.compiled
def _fetched(
    at: pointer, is_there: pointer, is_dim: pointer,
    MASKED: constexpr, PADDED: constexpr, WIDENS: constexpr,
) -> pointer:  # fmt: skip
    """A tile of keys or values, as they are multiplied, or of their codes."""
    if MASKED:
        tile = tl.load(at, mask=is_there & is_dim, other=0.0)
    elif PADDED:
        tile = tl.load(at, mask=is_dim, other=0.0)
    else:
        tile = tl.load(at)
    if WIDENS:
        tile = tile.to(tl.float32)
    return tile


@jit.compiled
def _scored(
    scores: pointer, by: scalar, position: pointer, is_there: pointer, last_seen: pointer,
    window: scalar, softcap: scalar,
    MASKED: constexpr, ONE_TOKEN: constexpr, HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """[queries, positions]: capped, and -inf ahead of the query and behind its window."""
    if HAS_SOFTCAP:
        # tanh x = 1 - 2 / (e^2x + 1), of x = score / softcap; `by` makes powers of two of e's. What
        # a division takes spills; by a logarithm the error is a few 1e-7 too.
        scores = 1.0 - 2.0 * tl.exp2(-tl.log2(tl.exp2(scores * (by * 2.0 / softcap)) + 1.0))
    if MASKED:
        if ONE_TOKEN:
            is_seen = is_there[None, :]
        elif HAS_WINDOW:
            # What is not there is ahead of every query or behind its window: of two masks, one.
            back = last_seen[:, None] - position[None, :]
            is_seen = (back >= 0) & (back < window)
        else:
            is_seen = is_there[None, :] & (position[None, :] <= last_seen[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
    return scores


@jit.compiled
def _weighed(
    scores: pointer, unit: scalar, top: pointer, total: pointer, MAY_SEE_NOTHING: constexpr
) -> pointer:
    """(weights of a tile, what is made of those before, their sum with these, highest score)."""
    higher = tl.maximum(top, tl.max(scores, 1) * unit)
    base = higher
    if MAY_SEE_NOTHING:
        # A query that has seen nothing yet: -inf - -inf would be NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
    # One fused multiply-add per score, and none of a query's bits lost to the scale.
    weights = tl.exp2(scores * unit - base[:, None])
    shrink = tl.exp2(top - base)
    return weights, shrink, total * shrink + tl.sum(weights, 1), higher


@jit.compiled
def attend_tile(
    queries: pointer, by: scalar, k: pointer, v: pointer, k_at: pointer, v_at: pointer,
    position: pointer, is_there: pointer, last_seen: pointer,
    top: pointer, total: pointer, sums: pointer, window: scalar, softcap: scalar,
    HEAD_DIM: constexpr, MASKED: constexpr, ONE_TOKEN: constexpr, WIDENS: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """(top, total, sums) with a tile of positions, whose keys and values lie at k_at and v_at."""
    PADDED: tl.constexpr = queries.shape[1] > HEAD_DIM
    dim = tl.arange(0, queries.shape[1])
    is_dim = dim < HEAD_DIM
    unit = softcap * 1.44269504 if HAS_SOFTCAP else by
    keys = tl.trans(_fetched(
        k + k_at[:, None] + dim[None, :], is_there[:, None], is_dim[None, :],
        MASKED, PADDED, WIDENS,
    ))  # fmt: skip
    scores = tl.dot(queries, keys, input_precision="ieee")
    scores = _scored(
        scores, by, position, is_there, last_seen, window, softcap,
        MASKED, ONE_TOKEN, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    weights, shrink, total, top = _weighed(scores, unit, top, total, MASKED and not ONE_TOKEN)
    sums = sums * shrink[:, None]
    values = _fetched(
        v + v_at[:, None] + dim[None, :], is_there[:, None], is_dim[None, :],
        MASKED, PADDED, WIDENS,
    )  # fmt: skip
    sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
    return top, total, sums


@jit.compiled
def _walk(
    queries: pointer, by: scalar, k: pointer, v: pointer, table: pointer,
    k_stride: stride, v_stride: stride, kv_head: scalar,
    start: scalar, behind: scalar, stop: scalar, last_seen: pointer,
    top: pointer, total: pointer, sums: pointer, window: scalar, softcap: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    PAGED: constexpr, MASKED: constexpr, WIDENS: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """Attend to positions [start, stop) too; without MASKED, to whole tiles that all queries see.
    Nobody sees those before `behind` of a window, which needs MASKED.
    PAGED: k and v are pages, found by `table`. Otherwise position p lies at k + p * k_stride.
    """
    for at in range(start, stop, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        is_there = (position < stop) & (position >= behind) if HAS_WINDOW else position < stop
        if PAGED:
            k_at = places(table, at, is_there, kv_head, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS)
            v_at = k_at
        else:
            lane, first = tl.arange(0, POSITIONS), tl.zeros((), tl.int64) + at
            k_at, v_at = first * k_stride + lane * k_stride, first * v_stride + lane * v_stride
        top, total, sums = attend_tile(
            queries, by, k, v, k_at, v_at, position, is_there, last_seen, top, total, sums,
            window, softcap, HEAD_DIM, MASKED, False, WIDENS, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    return top, total, sums


@jit.compiled
def attend_codes(
    evens: pointer, odds: pointer, by: scalar, k: pointer, v: pointer, place: pointer,
    position: pointer, is_there: pointer, last_seen: pointer,
    top: pointer, total: pointer, even: pointer, odd: pointer, window: scalar, softcap: scalar,
    HEAD_DIM: constexpr, MASKED: constexpr, ONE_TOKEN: constexpr, WIDENS: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """As `attend_tile`, of 8-bit codes.

    They are read in pairs, words of 16 bits, on the way of a cache of 16 bits: in 16 bytes a thread
    from memory, and turned by the instruction that loads matrices, which knows no bytes. A word has
    an even dimension and the odd one after it; queries and sums are in two halves likewise.
    """
    WORDS: tl.constexpr = HEAD_DIM // 2
    PADDED: tl.constexpr = evens.shape[1] > WORDS
    dim = tl.arange(0, evens.shape[1])
    is_dim = (dim < WORDS)[None, :]
    unit = softcap * 1.44269504 if HAS_SOFTCAP else by
    to, there = place[:, None] + dim[None, :], is_there[:, None]
    words = _fetched(k + to, there, is_dim, MASKED, PADDED, False)
    scores = tl.dot(evens, tl.trans(fp8.decoded_low(words, WIDENS)), input_precision="ieee")
    scores = tl.dot(odds, tl.trans(fp8.decoded_high(words, WIDENS)), scores, input_precision="ieee")
    scores = _scored(
        scores, by, position, is_there, last_seen, window, softcap,
        MASKED, ONE_TOKEN, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    exact, shrink, total, top = _weighed(scores, unit, top, total, MASKED and not ONE_TOKEN)
    words = _fetched(v + to, there, is_dim, MASKED, PADDED, False)
    weights = exact.to(evens.dtype)
    even, odd = even * shrink[:, None], odd * shrink[:, None]
    even = tl.dot(weights, fp8.decoded_low(words, WIDENS), even, input_precision="ieee")
    odd = tl.dot(weights, fp8.decoded_high(words, WIDENS), odd, input_precision="ieee")
    return top, total, even, odd


@jit.compiled
def _walk_codes(
    evens: pointer, odds: pointer, by: scalar, k: pointer, v: pointer, table: pointer,
    kv_head: scalar, start: scalar, behind: scalar, stop: scalar, last_seen: pointer,
    top: pointer, total: pointer, even: pointer, odd: pointer, window: scalar, softcap: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    MASKED: constexpr, WIDENS: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """As `_walk`, over pages of 8-bit codes."""
    for at in range(start, stop, POSITIONS):
        position = at + tl.arange(0, POSITIONS)
        is_there = (position < stop) & (position >= behind) if HAS_WINDOW else position < stop
        place = places(table, at, is_there, kv_head, KV_HEADS, HEAD_DIM // 2, BLOCK_SIZE, POSITIONS)
        top, total, even, odd = attend_codes(
            evens, odds, by, k, v, place, position, is_there, last_seen, top, total, even, odd,
            window, softcap, HEAD_DIM, MASKED, False, WIDENS, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    return top, total, even, odd


@jit.compiled
def in_pairs(pages: pointer) -> pointer:
    """Pages of codes as words of two."""
    return pages.to(tl.pointer_type(tl.int16), bitcast=True)


@jit.compiled
def halves(queries: pointer) -> pointer:
    """Their even dimensions, and the odd ones."""
    LINES: tl.constexpr = queries.shape[0]
    return tl.split(tl.reshape(queries, [LINES, queries.shape[1] // 2, 2]))


@jit.compiled
def whole(even: pointer, odd: pointer) -> pointer:
    """What `halves` has parted."""
    return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@jit.compiled
def _attended_codes(
    queries: pointer, by: scalar, k_pages: pointer, v_pages: pointer, table: pointer,
    kv_head: scalar, seen: scalar, token: pointer, start: scalar, middle: scalar, behind: scalar,
    stop: scalar, window: scalar, softcap: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    HAS_WHOLE: constexpr, WIDENS: constexpr,
    HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """As `attended`, over pages of 8-bit codes; all see all from `start` to `middle`."""
    LINES: tl.constexpr = queries.shape[0]
    WORDS: tl.constexpr = queries.shape[1] // 2
    k, v = in_pairs(k_pages), in_pairs(v_pages)
    evens, odds = halves(queries)
    top = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    even = tl.zeros([LINES, WORDS], tl.float32)
    odd = tl.zeros([LINES, WORDS], tl.float32)
    if HAS_WHOLE and not HAS_WINDOW:
        top, total, even, odd = _walk_codes(
            evens, odds, by, k, v, table, kv_head, start, behind, middle, token,
            top, total, even, odd, window, softcap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS,
            False, WIDENS, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        start = middle
    top, total, even, odd = _walk_codes(
        evens, odds, by, k, v, table, kv_head, start, behind, stop, seen + token,
        top, total, even, odd, window, softcap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS,
        True, WIDENS, HAS_WINDOW, HAS_SOFTCAP,
    )  # fmt: skip
    return top, total, whole(even, odd)


@jit.compiled
def attended(
    queries: pointer, by: scalar, k_pages: pointer, v_pages: pointer, k: pointer, v: pointer,
    table: pointer, begin: scalar, kv_head: scalar, seen: scalar, first: scalar, token: pointer,
    start: scalar, behind: scalar, stop: scalar, has_own: scalar,
    k_stride: stride, v_stride: stride, window: scalar, softcap: scalar,
    KV_HEADS: constexpr, HEAD_DIM: constexpr, BLOCK_SIZE: constexpr, POSITIONS: constexpr,
    HAS_WHOLE: constexpr, WIDENS: constexpr,
    IS_FP8: constexpr, HAS_WINDOW: constexpr, HAS_SOFTCAP: constexpr,
) -> pointer:  # fmt: skip
    """(highest score, sum of weights, weighted values) of a tile over positions [start, stop)."""
    # start ... own_stop ... middle ... stop: of the step's own tensors, of pages, masked.
    seen_by_all = tl.maximum(tl.minimum(stop, seen + first + 1) - start, 0)
    middle = start + seen_by_all // POSITIONS * POSITIONS
    if IS_FP8:
        top, total, sums = _attended_codes(
            queries, by, k_pages, v_pages, table, kv_head, seen, token, start, middle, behind,
            stop, window, softcap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS,
            HAS_WHOLE, WIDENS, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    else:
        top = tl.full([queries.shape[0]], float("-inf"), tl.float32)
        total = tl.zeros([queries.shape[0]], tl.float32)
        sums = tl.zeros(queries.shape, tl.float32)
        if HAS_WHOLE and not HAS_WINDOW:
            is_own = (seen == 0) & (has_own > 0)
            own, own_stop = begin.to(tl.int64), tl.where(is_own, middle, start)
            k_own = k + own * k_stride + kv_head * HEAD_DIM
            v_own = v + own * v_stride + kv_head * HEAD_DIM
            top, total, sums = _walk(
                queries, by, k_own, v_own, table, k_stride, v_stride, kv_head,
                start, behind, own_stop, token, top, total, sums, window, softcap,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, False, False, WIDENS,
                HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            top, total, sums = _walk(
                queries, by, k_pages, v_pages, table, k_stride, v_stride, kv_head,
                own_stop, behind, middle, token, top, total, sums, window, softcap,
                KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, True, False, WIDENS,
                HAS_WINDOW, HAS_SOFTCAP,
            )  # fmt: skip
            start = middle
        top, total, sums = _walk(
            queries, by, k_pages, v_pages, table, k_stride, v_stride, kv_head,
            start, behind, stop, seen + token, top, total, sums, window, softcap,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, POSITIONS, True, True, WIDENS,
            HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    return top, total, sums


@jit.compiled
def scaled(
    queries: pointer, scale_log2: scalar, k_scale: pointer, WIDENS: constexpr, IS_FP8: constexpr
) -> pointer:
    """Queries as they are multiplied, and what makes their products exponents of two."""
    by = scale_log2
    if WIDENS:
        queries = queries.to(tl.float32)
    if IS_FP8:
        # Codes are read as float16 of a 256th; float32 stays what it is.
        queries = queries if WIDENS else queries.to(tl.float16)
        by = scale_log2 * (256.0 * tl.load(k_scale))
    return queries, by
