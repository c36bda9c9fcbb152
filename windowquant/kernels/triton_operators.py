"""The paper's two fused operators by themselves: scores from packed K, and the weighted sum of packed V.

What `triton_attention` does in one launch, in two, with all scores in memory between them. For whoever needs the
scores, and for measuring what a single pass saves.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from windowquant.core.packed import PackedLayer
from windowquant.errors import UserError
from windowquant.kernels.triton_attention import FP_KIND, check_shapes, dense, layer_table, row_block
from windowquant.kernels.triton_common import PRUNE, UNSPECIALIZED, compute_dtype, configs, padded
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


@triton.jit
def _score_run(q, k, extent, target, own, scaling, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr):
    start, windows, size, span = extent
    TILE: tl.constexpr = KIND[2]
    pieces = tl.cdiv(size, TILE)
    for i in range(windows * pieces):
        window = i // pieces
        tokens = (i % pieces) * TILE + tl.arange(0, TILE)
        valid = tokens < size
        scores = key_scores(q, k, window, tokens, valid, D, DP, KIND[0]) * scaling
        places = target[:, None] + (start + window * span + tokens)[None, :]
        tl.store(places, scores, mask=own[:, None] & valid[None, :])


@triton.autotune(configs((2, 2), (1, 2), (4, 2)), key=["D", "BLOCK", "KINDS", "COMPUTE"], prune_configs_by=PRUNE)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def scores_kernel(
    q,
    table,
    first,
    fp_k,
    out,
    q_strides,
    k_strides,
    heads,
    group,
    queries,
    stored,
    fp_tokens,
    programs,
    budget,
    scaling,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    KINDS: tl.constexpr,
    FP_KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Program (share of the tokens, block of rows, head) writes its part of out, float32 [B * H, R, stored]."""
    share, block, at = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = head_at(at, heads)
    channels = tl.arange(0, DP)
    row = block * BLOCK + tl.arange(0, BLOCK)
    rows = group * queries
    own = row < rows
    places = row_places(q, q_strides, batch, head, row, group, queries)
    x = tl.load(places[:, None] + channels[None, :], mask=own[:, None] & (channels < D)[None, :], other=0).to(COMPUTE)
    target = out + (at.to(tl.int64) * rows + row) * stored
    if share < programs:
        begin, end = read_entries(first, share)
        for entry in range(begin, end):
            kind = tl.load(table + entry * ROW)
            extent = read_extent(table, entry)
            for i in tl.static_range(len(KINDS)):
                if kind == i:
                    k = read_side(table, entry, batch, head, fp_k, 0, KINDS[i][0])
                    _score_run(x, k, extent, target, own, scaling, D, DP, KINDS[i])
    else:
        begin = (share - programs) * budget
        k = fp_side(fp_k, k_strides, batch, head, begin)
        _score_run(x, k, fp_extent(begin, budget, stored, fp_tokens), target, own, scaling, D, DP, FP_KIND)


@triton.jit
def _sum_run(
    values, v, extent, weights, own, DTYPE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr
):
    start, windows, size, span = extent
    TILE: tl.constexpr = KIND[2]
    pieces = tl.cdiv(size, TILE)
    for i in range(windows * pieces):
        window = i // pieces
        tokens = (i % pieces) * TILE + tl.arange(0, TILE)
        valid = tokens < size
        places = weights[:, None] + (start + window * span + tokens)[None, :]
        p = tl.load(places, mask=own[:, None] & valid[None, :], other=0).to(DTYPE)
        values += weighted_values(p, v, window, tokens, valid, D, DP, KIND[1])
    return values


@triton.autotune(configs((2, 2), (1, 2), (4, 2)), key=["D", "BLOCK", "KINDS", "COMPUTE"], prune_configs_by=PRUNE)
@triton.jit(do_not_specialize=UNSPECIALIZED)
def weighted_kernel(
    p,
    table,
    first,
    fp_v,
    out,
    v_strides,
    heads,
    group,
    queries,
    stored,
    fp_tokens,
    programs,
    budget,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    KINDS: tl.constexpr,
    FP_KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """Program (share of the tokens, block of rows, head) sums its tokens: out, float32 [B * H, shares, R, D]."""
    share, block, at = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = head_at(at, heads)
    channels = tl.arange(0, DP)
    row = block * BLOCK + tl.arange(0, BLOCK)
    rows = group * queries
    own = row < rows
    weights = p + (at.to(tl.int64) * rows + row) * stored
    values = tl.zeros([BLOCK, DP], tl.float32)
    if share < programs:
        begin, end = read_entries(first, share)
        for entry in range(begin, end):
            kind = tl.load(table + entry * ROW)
            extent = read_extent(table, entry)
            for i in tl.static_range(len(KINDS)):
                if kind == i:
                    v = read_side(table, entry, batch, head, fp_v, 1, KINDS[i][1])
                    values = _sum_run(values, v, extent, weights, own, COMPUTE, D, DP, KINDS[i])
    else:
        begin = (share - programs) * budget
        v = fp_side(fp_v, v_strides, batch, head, begin)
        extent = fp_extent(begin, budget, stored, fp_tokens)
        values = _sum_run(values, v, extent, weights, own, COMPUTE, D, DP, FP_KIND)
    target = out + ((at.to(tl.int64) * tl.num_programs(0) + share) * rows + row) * D
    tl.store(target[:, None] + channels[None, :], values, mask=own[:, None] & (channels < D)[None, :])


@torch.no_grad()
def scores(q: Tensor, layer: PackedLayer, scaling: float) -> Tensor:
    """scaling * q . K for queries `q` [B, Hq, Tq, D] and every stored token, in stored order: float32 [B, Hq, Tq, T].

    Not masked: what slots hold is multiplied too. Raises UserError as `triton_attention.attend` does.
    """
    check_shapes(q, layer)
    (batch, q_heads, queries, channels), (_, heads, fp_tokens, _) = q.shape, layer.fp_k.shape
    stored, group = layer.order.shape[1], q_heads // heads
    out = q.new_empty(batch, q_heads, queries, stored, dtype=torch.float32)
    if out.numel() == 0:
        return out
    block = row_block(group * queries, channels)
    blocks = -(-group * queries // block)
    table = layer_table(layer, blocks)
    q, fp_k = dense(q), dense(layer.fp_k)
    scores_kernel[table.programs + -(-fp_tokens // table.budget), blocks, batch * heads](
        q,
        table.rows,
        table.first,
        fp_k,
        out,
        q.stride()[:3],
        fp_k.stride()[:3],
        heads,
        group,
        queries,
        stored,
        fp_tokens,
        table.programs,
        table.budget,
        scaling,
        D=channels,
        DP=padded(channels),
        BLOCK=block,
        KINDS=table.kinds,
        FP_KIND=FP_KIND,
        COMPUTE=compute_dtype(q.dtype),
    )
    return out


@torch.no_grad()
def weighted(p: Tensor, layer: PackedLayer, dtype: torch.dtype) -> Tensor:
    """Sum of all stored values weighted by `p` [B, Hq, Tq, T], any float dtype, stored order: `dtype` [B, Hq, Tq, D].

    Products are taken in `dtype`, sums in float32. Raises UserError as `triton_attention.attend` does.
    """
    (batch, q_heads, queries, stored), (_, heads, fp_tokens, channels) = p.shape, layer.fp_v.shape
    check_shapes(p.new_empty(batch, q_heads, 0, channels), layer)
    if stored != layer.order.shape[1]:
        raise UserError(f"There are {stored} weights a query for {layer.order.shape[1]} stored tokens; give one each.")
    group, rows = q_heads // heads, q_heads // heads * queries
    if p.numel() == 0:
        return p.new_zeros(batch, q_heads, queries, channels, dtype=dtype)
    block = row_block(rows, channels)
    blocks = -(-rows // block)
    table = layer_table(layer, blocks)
    shares = table.programs + -(-fp_tokens // table.budget)
    p, fp_v = p.contiguous(), dense(layer.fp_v)
    out = p.new_empty(batch * heads, shares, rows, channels, dtype=torch.float32)
    weighted_kernel[shares, blocks, batch * heads](
        p,
        table.rows,
        table.first,
        fp_v,
        out,
        fp_v.stride()[:3],
        heads,
        group,
        queries,
        stored,
        fp_tokens,
        table.programs,
        table.budget,
        D=channels,
        DP=padded(channels),
        BLOCK=block,
        KINDS=table.kinds,
        FP_KIND=FP_KIND,
        COMPUTE=compute_dtype(dtype),
    )
    return out.sum(1).view(batch, q_heads, queries, channels).to(dtype)
