"""What fusing replaces (paper, Table 9): K and V brought back to 16 bit in memory, then matrix products."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from windowquant.core.packed import PackedLayer
from windowquant.kernels.reference import stored_mask
from windowquant.kernels.triton_attention import FP_KIND, check_shapes, dense, layer_table
from windowquant.kernels.triton_common import NEVER, UNSPECIALIZED, cast, configs, padded
from windowquant.kernels.triton_tiles import (
    ROW,
    fp_extent,
    fp_side,
    head_at,
    read_entries,
    read_extent,
    read_side,
    values_of,
)


@triton.jit
def _write_run(side, extent, target, D: tl.constexpr, DP: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr):
    start, windows, size, span = extent
    channels = tl.arange(0, DP)
    pieces = tl.cdiv(size, TILE)
    for i in range(windows * pieces):
        window = i // pieces
        tokens = (i % pieces) * TILE + tl.arange(0, TILE)
        valid = tokens < size
        x = values_of(side, window, tokens, valid, D, DP, KIND)
        places = target + (start + window * span + tokens)[:, None].to(tl.int64) * D + channels[None, :]
        tl.store(places, cast(x, target.dtype.element_ty), mask=valid[:, None] & (channels < D)[None, :])


@triton.autotune(configs((4, 2), (4, 3), (8, 2)), key=["D", "KINDS", "SIDE"])
@triton.jit(do_not_specialize=UNSPECIALIZED)
def dequantize_kernel(
    table,
    first,
    fp,
    out,
    fp_strides,
    heads,
    stored,
    fp_tokens,
    programs,
    budget,
    D: tl.constexpr,
    DP: tl.constexpr,
    KINDS: tl.constexpr,
    FP_KIND: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Program (share of the tokens, head) writes its tokens of K (SIDE 0) or V (1) to out, [B * H, stored, D]."""
    share, at = tl.program_id(0), tl.program_id(1)
    batch, head = head_at(at, heads)
    target = out + at.to(tl.int64) * stored * D
    if share < programs:
        begin, end = read_entries(first, share)
        for entry in range(begin, end):
            kind = tl.load(table + entry * ROW)
            extent = read_extent(table, entry)
            for i in tl.static_range(len(KINDS)):
                if kind == i:
                    side = read_side(table, entry, batch, head, fp, SIDE, KINDS[i][SIDE])
                    _write_run(side, extent, target, D, DP, KINDS[i][SIDE], KINDS[i][2])
    else:
        begin = (share - programs) * budget
        side = fp_side(fp, fp_strides, batch, head, begin)
        _write_run(side, fp_extent(begin, budget, stored, fp_tokens), target, D, DP, FP_KIND[SIDE], FP_KIND[2])


@torch.no_grad()
def dequantized(layer: PackedLayer) -> tuple[Tensor, Tensor]:
    """K and V of a layer in stored order, in the dtype of its 16-bit block: [B, H, T, D] each, by one launch each."""
    batch, heads, fp_tokens, channels = layer.fp_k.shape
    check_shapes(layer.fp_k, layer)
    stored = layer.order.shape[1]
    table = layer_table(layer, 1)
    shares = table.programs + -(-fp_tokens // table.budget)
    made = []
    for side, fp in enumerate((dense(layer.fp_k), dense(layer.fp_v))):
        out = fp.new_empty(batch, heads, stored, channels)
        if out.numel():
            dequantize_kernel[shares, batch * heads](
                table.rows,
                table.first,
                fp,
                out,
                fp.stride()[:3],
                heads,
                stored,
                fp_tokens,
                table.programs,
                table.budget,
                D=channels,
                DP=padded(channels),
                KINDS=table.kinds,
                FP_KIND=FP_KIND,
                SIDE=side,
            )
        made.append(out)
    return made[0], made[1]


@torch.no_grad()
def attend_unfused(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
    """`triton_attention.attend` in the way that is not fused; same arguments, same result up to rounding."""
    check_shapes(q, layer)
    batch, q_heads, queries, channels = q.shape
    k, v = (x.to(q.dtype).flatten(0, 1) for x in dequantized(layer))
    scores = torch.bmm(q.reshape(k.shape[0], -1, channels), k.mT).float() * scaling
    bias = stored_mask(mask, layer.order, queries)
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, NEVER.value)
        scores.view(batch, q_heads, queries, -1).add_(bias).clamp_(min=NEVER.value)
    return torch.bmm(scores.softmax(-1).to(q.dtype), v).view(batch, q_heads, queries, channels)
