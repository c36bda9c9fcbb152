"""Attention over a packed layer on the CPU, in one pass over the codes."""

import struct
import sys
import threading
from array import array
from functools import lru_cache

import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer
from windowquant.errors import UserError
from windowquant.kernels.cpu import integer
from windowquant.kernels.cpu.amx import available
from windowquant.kernels.cpu.kinds import CHANNEL_STRIDE, MAX_CHANNELS, NUMPY_KINDS, TOKENS
from windowquant.kernels.cpu.loop import attend_parts
from windowquant.kernels.cpu.steps import LOG2_E, MASKED, WORKSPACE
from windowquant.kernels.cpu.table import table_of
from windowquant.kernels.cpu.threads import run
from windowquant.kernels.reference import stored_mask

_ROWS = (8, 7, 4, 1)  # few, for each is compiled apart
_GRAIN = 32  # tiles that are worth a thread of their own
_TILES = {rows: int(config.ctypes.data) for rows, config in integer.CONFIGS.items()}
_local = threading.local()


@torch.no_grad()
def attend(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention of queries `q` [B, Hq, Tq, D] over a packed layer; `reference.attend` says the rest.

    Codes become floats in registers, and sums are float32. The fast path is that of window_channel groups, windows of a
    multiple of 32 tokens, and a head_dim whose rows of codes are multiples of 16 bytes. Elsewhere a tile is copied and
    padded, or scales are applied one by one; a mask is gathered into stored order, float32 [B or 1, Tq, T].

    Queries of 16 bits, with a head_dim that is a multiple of 64, are multiplied as integers on that path where the
    processor multiplies tiles of bytes (AMX): queries, times a window's scale, and probabilities are rounded to 16 bits
    (`integer`), and sums are exact. The result is off by about 1e-4 of its largest value, which is less than by the
    rounding of such queries; those for which scores would be off by more than 5e-4 are multiplied as floats.

    Uses as many threads as torch, and is safe to call from several. Compiled at the first call for a kv dtype and a
    number of query rows that share a KV head (as 1, 4, 7 or 8 at a time), which takes some 5 s; the result is kept on
    disk (`compiled`). Many query rows take as many passes over codes that are in the processor's cache by then, which
    is several times faster than unpacking them and multiplying matrices.
    Raises UserError for a head_dim above 256, for values that are not float16, bfloat16 or float32 throughout, and for
    queries that do not fit.
    """
    _check(q, layer)
    batch, heads, kept, channels = layer.fp_k.shape
    queries = q.shape[2]
    rows = q.shape[1] // heads * queries
    at_once = _rows_at_once(rows)
    padded = -(-rows // at_once) * at_once
    table = table_of(layer)
    tiles, tokens = table.tiles - (-kept // TOKENS), table.tokens + kept
    if not tiles:
        return torch.zeros_like(q)
    bias = _bias(mask, layer.order, queries)
    parts = max(1, min(torch.get_num_threads(), batch * heads * tiles // _GRAIN))
    given, out = q.float().contiguous(), torch.empty(q.shape)
    buffers = torch.empty(3, batch * heads + parts, padded, CHANNEL_STRIDE)
    scaled, each = buffers.data_ptr(), buffers.nbytes // 3
    # fmt: off
    job = array("q", (
        0, 0, parts,
        table.address, len(table.rows), tiles, tokens,
        given.data_ptr(), _bits(scaling * float(LOG2_E)), rows, padded, queries,
        batch * heads, heads, channels,
        *((0, 0) if bias is None else (bias.data_ptr(), 4 * bias.stride(0) if len(bias) > 1 else 0)),
        scaled, scaled + each, _workspace(parts), out.data_ptr(),
        _TILES[at_once] if _by_integers(q) else 0, scaled + 2 * each,
    ))
    # fmt: on
    run(attend_parts(at_once, NUMPY_KINDS[layer.fp_k.dtype]).address, job.buffer_info()[0], parts)
    return out.to(q.dtype)


def _by_integers(q: Tensor) -> bool:
    """Whether products may be those of integers."""
    return q.dtype != torch.float32 and available()


@lru_cache
def _bits(x: float) -> int:
    """Those of a float32."""
    return int.from_bytes(struct.pack("=f", x), sys.byteorder)


def _workspace(parts: int) -> int:
    """Address of workspaces for a call's parts, kept for this thread's next call."""
    if getattr(_local, "parts", 0) < parts:
        _local.work, _local.parts = torch.empty(parts * WORKSPACE, dtype=torch.uint8), parts
    return int(_local.work.data_ptr())


def _check(q: Tensor, layer: PackedLayer) -> None:
    batch, heads, _, channels = layer.fp_k.shape
    if q.shape[0] != batch or q.shape[3] != channels or q.shape[1] % heads:
        raise UserError(
            f"Queries of shape {list(q.shape)} do not fit a layer of {batch} requests, {heads} KV heads and head_dim "
            f"{channels}; give [{batch}, a multiple of {heads}, tokens, {channels}]."
        )
    if channels > MAX_CHANNELS:
        raise UserError(
            f"The model has a head_dim of {channels}; the CPU backend takes up to {MAX_CHANNELS}: set "
            "backend=reference."
        )
    if layer.fp_k.dtype not in NUMPY_KINDS:
        raise UserError(
            f"K and V are stored as {layer.fp_k.dtype}; the CPU backend takes float16, bfloat16 and float32: set "
            "kv_dtype, or backend=reference."
        )
    if layer.fp_k.stride(3) != 1 or layer.fp_v.stride(3) != 1:
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
