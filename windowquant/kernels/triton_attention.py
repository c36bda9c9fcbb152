"""Attention over a packed layer on a CUDA device: one launch over everything stored, and a small combine.

The contract is that of `kernels.reference.attend`. All segments, whatever their number and bits, and the 16-bit block
are shared out among the programs of one launch (`triton_table`); what a program does is in `triton_decode` and
`triton_tiles`; codes are expanded in registers (`triton_codes`), so a step moves the packed bytes and no more. The
launcher reads shapes only, never values: a step does not wait for the device and can be captured in a CUDA graph once
it has run (a first call tunes, and makes the layer's table). A captured step keeps the length of the 16-bit block; to
grow within a graph, give the block with its room, and -1 in `order` where there is no token yet.
"""

import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer
from windowquant.errors import UserError
from windowquant.kernels.triton_common import LOG2E, check_device, compute_dtype, padded, processors
from windowquant.kernels.triton_decode import attend_kernel, combine_kernel
from windowquant.kernels.triton_table import FLAT_TOKENS, Kind, SideKind, WorkTable, work_table

FP_KIND = Kind(SideKind(16, "none", False, 16), SideKind(16, "none", False, 16), FLAT_TOKENS)
"""How the kernels take the 16-bit block."""

_SUMS = 4096  # float32 sums of a tile, rows times channels, at most: registers


def row_block(rows: int, channels: int) -> int:
    """Rows of a tile: all `rows` that share a KV head, padded, unless they are too many."""
    return min(padded(rows), 64, _SUMS // padded(channels))


def check_shapes(q: Tensor, layer: PackedLayer) -> None:
    """Raise UserError unless queries [B, Hq, Tq, D] fit the layer and the device."""
    check_device(q)
    batch, heads, _, channels = layer.fp_k.shape
    if q.shape[0] != batch or q.shape[3] != channels or q.shape[1] % heads:
        raise UserError(
            f"Queries of shape {list(q.shape)} do not fit a layer of {batch} requests, {heads} KV heads and head_dim "
            f"{channels}; give [{batch}, a multiple of {heads}, tokens, {channels}]."
        )
    if channels > 256:
        raise UserError(f"The Triton backend takes a head_dim up to 256, not {channels}; choose another backend.")


def dense(x: Tensor) -> Tensor:
    """`x` with neighbouring channels, as the kernels read it; nearly always it is already."""
    return x if x.stride(-1) == 1 else x.contiguous()


def layer_table(layer: PackedLayer, row_blocks: int) -> WorkTable:
    """The layer's work table for launches of so many blocks of rows."""
    copies = layer.fp_k.shape[0] * layer.fp_k.shape[1] * row_blocks
    return work_table(layer, copies, processors(layer.fp_k.device))


def _mask(mask: Tensor | None, q: Tensor) -> tuple[Tensor, tuple[int, int, int], str]:
    """The mask's tensor (something, if there is none), its strides over requests, queries and columns, and its kind."""
    if mask is None:
        return q, (0, 0, 0), "causal"
    b, _, t, c = mask.expand(q.shape[0], -1, q.shape[2], -1).stride()
    return mask, (b, t, c), "bool" if mask.dtype == torch.bool else "additive"


@torch.no_grad()
def attend(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of queries `q` [B, Hq, Tq, D] over a packed layer, as `kernels.reference.attend` has it.

    Products are taken in the dtype of `q`, sums in float32. Raises UserError for tensors that are not on a CUDA device,
    another dtype than float16, bfloat16 or float32, and a head_dim above 256.
    """
    check_shapes(q, layer)
    (batch, q_heads, queries, channels), (_, heads, fp_tokens, _) = q.shape, layer.fp_k.shape
    stored, group = layer.order.shape[1], q_heads // heads
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    if stored == 0 or out.numel() == 0:
        return out.zero_()
    rows = group * queries
    block = row_block(rows, channels)
    blocks = -(-rows // block)
    table = layer_table(layer, blocks)
    shares = table.programs + -(-fp_tokens // table.budget)
    largest, total = q.new_empty(2, batch * heads, shares, rows, dtype=torch.float32)
    values = q.new_empty(batch * heads, shares, rows, channels, dtype=torch.float32)
    q, fp_k, fp_v = dense(q), dense(layer.fp_k), dense(layer.fp_v)
    mask, mask_strides, mask_kind = _mask(mask, q)
    attend_kernel[shares, blocks, batch * heads](
        q,
        table.rows,
        table.first,
        fp_k,
        fp_v,
        layer.order,
        mask,
        largest,
        total,
        values,
        q.stride()[:3],
        fp_k.stride()[:3],
        fp_v.stride()[:3],
        *layer.order.stride(),
        *mask_strides,
        heads,
        group,
        queries,
        stored,
        fp_tokens,
        table.programs,
        table.budget,
        scaling * LOG2E,
        D=channels,
        DP=padded(channels),
        BLOCK=block,
        KINDS=table.kinds,
        FP_KIND=FP_KIND,
        COMPUTE=compute_dtype(q.dtype),
        MASK=mask_kind,
    )
    combine_kernel[rows, batch * heads](
        largest,
        total,
        values,
        out,
        out.stride()[:3],
        heads,
        group,
        queries,
        shares,
        D=channels,
        DP=padded(channels),
        BLOCK=16,
    )
    return out
