"""Attention over a packed layer on the CPU, in one pass over the codes."""

import threading
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer
from windowquant.errors import UserError
from windowquant.kernels.cpu import job as j
from windowquant.kernels.cpu.loop import attend_parts
from windowquant.kernels.cpu.steps import MASKED, WORKSPACE
from windowquant.kernels.cpu.table import table_of
from windowquant.kernels.cpu.threads import run
from windowquant.kernels.cpu.tiles import CHANNEL_STRIDE, MAX_CHANNELS, NUMPY_KINDS
from windowquant.kernels.reference import stored_mask

_ROWS = (8, 7, 4, 1)  # few, for each is compiled apart
_GRAIN = 32  # tiles that are worth a thread of their own
_local = threading.local()


@torch.no_grad()
def attend(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of queries `q` [B, Hq, Tq, D] over a packed layer; `reference.attend` says the rest.

    Codes become floats in registers, and sums are float32. The fast path is that of window_channel groups, windows of a
    multiple of 32 tokens, and a head_dim whose rows of codes are multiples of 16 bytes. Elsewhere a tile is copied and
    padded, or scales are applied one by one; a mask is gathered into stored order, float32 [B or 1, Tq, T].

    Uses as many threads as torch, and is safe to call from several. Compiled at the first call for a kv dtype and a
    number of query rows that share a KV head (as 1, 4, 7 or 8 at a time), which takes some 5 s; the result is kept on
    disk (`compiled`). Many query rows take as many passes over codes that are in the processor's cache by then, which
    is several times faster than unpacking them and multiplying matrices.
    Raises UserError for a head_dim above 256, for values that are not float16, bfloat16 or float32 throughout, and for
    queries that do not fit.
    """
    _check(q, layer)
    batch, q_heads, queries, channels = q.shape
    heads = layer.fp_k.shape[1]
    rows = q_heads // heads * queries
    at_once = _rows_at_once(rows)
    padded = -(-rows // at_once) * at_once
    table = table_of(layer)
    if not table.tiles:
        return torch.zeros_like(q)
    bias = _bias(mask, layer.order, queries)
    parts = max(1, min(torch.get_num_threads(), batch * heads * table.tiles // _GRAIN))
    given = q.reshape(batch * heads, rows, channels).float().contiguous()
    out = torch.empty(batch * heads, rows, channels)
    buffers = torch.empty(2, batch * heads + parts, padded, CHANNEL_STRIDE)
    job = np.zeros(j.SIZE, np.int64)
    job[j.PARTS] = parts
    job[j.TABLE], job[j.SEGMENTS] = table.rows.ctypes.data, len(table.rows)
    job[j.TILES], job[j.TOKENS] = table.tiles, table.tokens
    job[j.Q], job.view(np.float32)[2 * j.SCALING] = given.data_ptr(), scaling
    job[j.ROWS], job[j.PADDED_ROWS], job[j.QUERIES] = rows, padded, queries
    job[j.ALL_HEADS], job[j.HEADS], job[j.CHANNELS] = batch * heads, heads, channels
    if bias is not None:
        job[j.BIAS], job[j.BIAS_STEP] = bias.data_ptr(), 4 * bias.stride(0) if len(bias) > 1 else 0
    job[j.SCALED] = buffers.data_ptr()
    job[j.PIECES] = job[j.SCALED] + 4 * buffers.stride(0)
    job[j.WORK], job[j.OUT] = _workspace(parts), out.data_ptr()
    run(attend_parts(at_once, NUMPY_KINDS[layer.fp_k.dtype]).address, job.ctypes.data, parts)
    return out.view(batch, q_heads, queries, channels).to(q.dtype)


def _workspace(parts: int) -> int:
    """Address of workspaces for a call's parts, kept for this thread's next call."""
    if getattr(_local, "parts", 0) < parts:
        _local.work, _local.parts = torch.empty(parts * WORKSPACE, dtype=torch.uint8), parts
    return int(_local.work.data_ptr())


def _check(q: Tensor, layer: PackedLayer) -> None:
    if q.shape[3] > MAX_CHANNELS:
        raise UserError(
            f"The model has a head_dim of {q.shape[3]}; the CPU backend takes up to {MAX_CHANNELS}: set "
            "backend=reference."
        )
    if layer.fp_k.dtype not in NUMPY_KINDS:
        raise UserError(
            f"K and V are stored as {layer.fp_k.dtype}; the CPU backend takes float16, bfloat16 and float32: set "
            "kv_dtype, or backend=reference."
        )
    batch, heads, _, channels = layer.fp_k.shape
    if q.shape[0] != batch or q.shape[3] != channels or q.shape[1] % heads:
        raise UserError(
            f"Queries of shape {list(q.shape)} do not fit a layer of {batch} requests, {heads} KV heads and head_dim "
            f"{channels}; give [{batch}, a multiple of {heads}, tokens, {channels}]."
        )
    if any(x.stride(3) != 1 for x in (layer.fp_k, layer.fp_v)):
        raise UserError("The channels of stored K and V must lie next to each other; store them contiguous.")


@lru_cache
def _rows_at_once(rows: int) -> int:
    """How many query rows share the codes in registers; a code costs about as much as 2.5 products with it."""
    return min(_ROWS, key=lambda step: -(-rows // step) * (step + 2.5))


def _bias(mask: Tensor | None, order: Tensor, queries: int) -> Tensor | None:
    """What is added to scores, float32 [B or 1, Tq, T] in stored order; None: nothing, or causal."""
    if mask is None and (order.stride(1) == 0 or int(order.amin()) >= 0):
        return None
    stored = stored_mask(mask, order, queries)
    if stored is None:
        return None
    if stored.dtype == torch.bool:
        stored = torch.zeros(stored.shape).masked_fill_(~stored, float(MASKED))
    return stored[:, 0].float().contiguous()
