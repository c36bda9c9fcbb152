"""The kernels behind `triton_attention`: partial attention of one program's share of the tokens, and the combine.

Split-KV flash decoding: a program takes one KV head of one request, a block of the rows that share it (query heads of
the group times query tokens) and some runs of windows, whatever their bits, or a piece of the 16-bit block. It leaves
the largest score, the sum of weights and the weighted values of its tokens, float32; the combine joins them.
"""

import triton
import triton.language as tl

from windowquant.kernels.triton_common import LOG2E, NEVER, PRUNE, UNSPECIALIZED, cast, configs
from windowquant.kernels.triton_tiles import (
    ROW,
    fp_extent,
    fp_side,
    head_at,
    key_scores,
    read_entries,
    read_extent,
    read_side,
    row_places,
    weighted_values,
)

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _visible(scores, stored, valid, query, seeing, MASK: tl.constexpr):
    """`scores` [R, T] of stored tokens [T], biased as an additive mask says, and NEVER where not to be attended.

    seeing: (order, its token stride, mask, its strides over queries and columns, stored tokens before the first query's
    own); order and mask point to the request at hand. MASK: "causal" (none given), "bool" or "additive".
    """
    order, over_stored, mask, over_queries, over_columns, past = seeing
    columns = tl.load(order + stored * over_stored, mask=valid, other=-1)
    seen = (columns >= 0)[None, :] & (query >= 0)[:, None]
    if MASK == "causal":
        seen = seen & (stored[None, :] <= (past + query)[:, None])
    else:
        place = mask + query[:, None] * over_queries + tl.maximum(columns, 0)[None, :] * over_columns
        if MASK == "bool":
            seen = seen & (tl.load(place, mask=seen, other=0) != 0)
        else:
            bias = tl.load(place, mask=seen, other=0).to(tl.float32)
            scores = tl.maximum(scores + bias * _LOG2E, NEVER)
    return tl.where(seen, scores, NEVER)


@triton.jit
def _attend_run(
    state,
    q,
    query,
    k,
    v,
    extent,
    seeing,
    factor,
    D: tl.constexpr,
    DP: tl.constexpr,
    KIND: tl.constexpr,
    MASK: tl.constexpr,
):
    """Take the tokens of a run into `state` (largest scores [R], sums [R], weighted values [R, DP]).

    extent: (first stored token, windows, tokens a window, stored tokens from one window to the next).
    """
    largest, total, values = state
    start, windows, size, span = extent
    TILE: tl.constexpr = KIND[2]
    pieces = tl.cdiv(size, TILE)
    for i in range(windows * pieces):
        window = i // pieces
        tokens = (i % pieces) * TILE + tl.arange(0, TILE)
        valid = tokens < size
        scores = key_scores(q, k, window, tokens, valid, D, DP, KIND[0]) * factor
        scores = _visible(scores, start + window * span + tokens, valid, query, seeing, MASK)
        reached = tl.maximum(largest, tl.max(scores, 1))
        faded = tl.exp2(largest - reached)
        p = tl.exp2(scores - reached[:, None]).to(q.dtype)
        total = total * faded + tl.sum(p.to(tl.float32), 1)
        values = values * faded[:, None] + weighted_values(p, v, window, tokens, valid, D, DP, KIND[1])
        largest = reached
    return largest, total, values


@triton.autotune(
    configs((2, 2), (1, 2), (4, 2), (2, 3), (4, 3)),
    key=["D", "BLOCK", "KINDS", "COMPUTE", "MASK"],
    prune_configs_by=PRUNE,
)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def attend_kernel(
    q,
    table,
    first,
    fp_k,
    fp_v,
    order,
    mask,
    largest_out,
    total_out,
    values_out,
    q_strides,
    k_strides,
    v_strides,
    order_rows,
    order_tokens,
    mask_rows,
    mask_queries,
    mask_columns,
    heads,
    group,
    queries,
    stored,
    fp_tokens,
    programs,
    budget,
    factor,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    KINDS: tl.constexpr,
    FP_KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASK: tl.constexpr,
):
    """Program (share of the tokens, block of rows, request * KV heads + KV head); see the module.

    q [B, Hq, Tq, D]; table, first: `triton_table.WorkTable`; fp_k, fp_v [B, H, fp_tokens, D]; order [B, stored];
    mask [B, Tq, columns]; largest_out, total_out [B * H, shares, R], values_out [B * H, shares, R, D], float32. Strides
    leave out the last dimension where it is channels, whose stride is 1. factor: scaling * log2(e). KINDS: the table's,
    FP_KIND: of the 16-bit block.
    """
    share, block, at = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = head_at(at, heads)
    channels = tl.arange(0, DP)
    row = block * BLOCK + tl.arange(0, BLOCK)
    rows = group * queries
    query = row % queries
    own = (row < rows)[:, None] & (channels < D)[None, :]
    places = row_places(q, q_strides, batch, head, row, group, queries)
    x = tl.load(places[:, None] + channels[None, :], mask=own, other=0).to(COMPUTE)
    masked = mask + batch * mask_rows
    seeing = order + batch * order_rows, order_tokens, masked, mask_queries, mask_columns, stored - queries
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    values = tl.zeros([BLOCK, DP], tl.float32)
    if share < programs:
        begin, end = read_entries(first, share)
        for entry in range(begin, end):
            kind = tl.load(table + entry * ROW)
            extent = read_extent(table, entry)
            for i in tl.static_range(len(KINDS)):
                if kind == i:
                    k = read_side(table, entry, batch, head, fp_k, 0, KINDS[i][0])
                    v = read_side(table, entry, batch, head, fp_v, 1, KINDS[i][1])
                    state = largest, total, values
                    largest, total, values = _attend_run(
                        state, x, query, k, v, extent, seeing, factor, D, DP, KINDS[i], MASK
                    )
    else:
        begin = (share - programs) * budget
        k = fp_side(fp_k, k_strides, batch, head, begin)
        v = fp_side(fp_v, v_strides, batch, head, begin)
        extent = fp_extent(begin, budget, stored, fp_tokens)
        state = largest, total, values
        largest, total, values = _attend_run(state, x, query, k, v, extent, seeing, factor, D, DP, FP_KIND, MASK)
    target = (at.to(tl.int64) * tl.num_programs(0) + share) * rows + row
    tl.store(largest_out + target, largest, mask=row < rows)
    tl.store(total_out + target, total, mask=row < rows)
    tl.store(values_out + target[:, None] * D + channels[None, :], values, mask=own)


@triton.autotune(configs((1, 2), (2, 2), (4, 2)), key=["D"])
@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    largest_in,
    total_in,
    values_in,
    out,
    out_strides,
    heads,
    group,
    queries,
    shares,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Join what the shares of one row left: program (row, request * KV heads + KV head) writes out [B, Hq, Tq, D]."""
    row, at = tl.program_id(0), tl.program_id(1)
    rows = group * queries
    channels = tl.arange(0, DP)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    values = tl.zeros([DP], tl.float32)
    for begin in range(0, shares, BLOCK):
        share = begin + tl.arange(0, BLOCK)
        place = (at.to(tl.int64) * shares + share) * rows + row
        found = tl.load(largest_in + place, mask=share < shares, other=float("-inf"))
        reached = tl.maximum(largest, tl.max(found, 0))
        faded, weight = tl.exp2(largest - reached), tl.exp2(found - reached)
        mask = (share < shares)[:, None] & (channels < D)[None, :]
        parts = tl.load(values_in + place[:, None] * D + channels[None, :], mask=mask, other=0)
        total = total * faded + tl.sum(weight * tl.load(total_in + place, mask=share < shares, other=0), 0)
        values = values * faded + tl.sum(weight[:, None] * parts, 0)
        largest = reached
    batch, head = head_at(at, heads)
    target = row_places(out, out_strides, batch, head, row, group, queries) + channels
    tl.store(target, cast(values / total, out.dtype.element_ty), mask=channels < D)
