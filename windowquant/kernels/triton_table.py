"""What the Triton kernels of a packed layer read first: which programs there are, and which windows each one takes.

A layer has as many segments as its plan happens to make, of several bit-widths, and one launch serves them all. So a
program finds its work in a table on the device: rows of addresses and strides, each a run of windows of one segment.
Runs are cut so that every program has about the same number of tokens. The table is made once for the segments of a
layer and kept while they live; the 16-bit block, which grows, is no part of it, but is cut into as large pieces.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer, Segment, WindowBlock
from windowquant.core.quantizer import PER_TOKEN
from windowquant.errors import UserError

FLAT_TOKENS = 32
"""Tokens in a tile where scales do not change from window to window."""

_LEAST = 128  # tokens that are worth a program of their own
_PROGRAMS_PER_SM = 4


class SideKind(NamedTuple):
    """What of K or V a kernel is compiled for.

    bits: 16, 8, 4, 2 or 1. groups: "channel" (each channel has its scale), "token" (each token), "whole" (all elements
    of a head share one) or "none" (16 bits). symmetric: the offset follows from the scale. align: bytes, a power of two
    up to 16, of which the addresses and strides of codes, and of scales of channels, are multiples.
    """

    bits: int
    groups: str
    symmetric: bool
    align: int


class Kind(NamedTuple):
    """What of a run a kernel is compiled for; tile: tokens that are worked on at a time."""

    k: SideKind
    v: SideKind
    tile: int


@dataclass(frozen=True, eq=False)
class WorkTable:
    """The work of a launch over a layer's segments.

    rows: int64 [entries, 27] on the layer's device; a row is (index of its kind, first stored token, windows, tokens a
    window, stored tokens from one window to the next), then for K and for V: addresses of codes, scale and offset,
    strides of codes over B, H, W and S, and strides of scales over B, H, W and S (0 where they are broadcast).
    first: int64 [programs + 1]; program p takes rows first[p] up to first[p + 1]. kinds: what rows refer to. Without
    programs there are no kinds, and neither tensor holds anything of use.
    budget: tokens of the 16-bit block that a program takes.
    """

    rows: Tensor
    first: Tensor
    kinds: tuple[Kind, ...]
    programs: int
    budget: int


@dataclass(frozen=True)
class _Side:
    """K or V of a run: what `WorkTable.rows` holds of it, and how far apart windows lie, in bytes of each address."""

    kind: SideKind
    addresses: tuple[int, int, int]
    strides: tuple[int, ...]
    steps: tuple[int, int, int]
    token_steps: tuple[int, int, int]
    flat: bool

    def row(self, window: int, token: int) -> list[int]:
        """Its part of a table row for the run that starts at this window and token."""
        moved = zip(self.addresses, self.steps, self.token_steps, strict=True)
        return [*(address + window * w + token * t for address, w, t in moved), *self.strides]


def _strides(x: Tensor) -> list[int]:
    """Strides in elements, 0 where there is one element."""
    return [stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True)]


def _side(block: WindowBlock, dtype: torch.dtype, name: str) -> _Side:
    codes, wide = block.codes, block.bits == 16
    if codes.stride(-1) != 1 or (not block.symmetric and not wide and block.offset.stride() != block.scale.stride()):
        raise UserError(f"{name} of a segment is laid out unlike what the quantizer makes; make it contiguous.")
    if (codes if wide else block.scale).dtype != dtype:
        raise UserError(f"{name} of a segment is not kept in {dtype}, as the 16-bit block is; give both one dtype.")
    b, h, w, s, _ = _strides(codes)
    size, itemsize = block.shape[3], codes.element_size()
    align = gcd(16, codes.data_ptr(), *(stride * itemsize for stride in (b, h, w, s)))
    if wide:
        kind = SideKind(16, "none", False, align)
        steps, token_steps = (w * itemsize, 0, 0), (s * itemsize, 0, 0)
        return _Side(kind, (codes.data_ptr(), 0, 0), (b, h, w, s, 0, 0, 0, 0), steps, token_steps, w == size * s)
    sb, sh, sw, ss, sd = _strides(block.scale)
    per_token = block.granularity in PER_TOKEN
    groups = "token" if per_token else "channel" if sd else "whole"
    unit = block.scale.element_size()
    offset = 0 if block.symmetric else block.offset.data_ptr()
    if groups == "channel":
        align = gcd(align, block.scale.data_ptr(), offset, *(stride * unit for stride in (sb, sh, sw)))
    kind = SideKind(block.bits, groups, block.symmetric, align)
    steps, token_steps = (w, sw * unit, sw * unit), (s, ss * unit, ss * unit)
    flat = w == size * s and sw == size * ss
    addresses = (codes.data_ptr(), block.scale.data_ptr(), offset)
    return _Side(kind, addresses, (b, h, w, s, sb, sh, sw, ss), steps, token_steps, flat)


class _Builder:
    """Cuts runs into rows and programs of about `budget` tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[list[int]] = []
        self.first = [0]
        self.kinds: dict[Kind, int] = {}
        self._room = budget

    def add(self, segment: Segment, start: int, dtype: torch.dtype) -> None:
        """Add a segment whose first stored token is `start`."""
        _, _, windows, size, _ = segment.k.shape
        if windows * size == 0:
            return
        k, v = _side(segment.k, dtype, "K"), _side(segment.v, dtype, "V")
        flat = windows == 1 or (k.flat and v.flat)
        tile = FLAT_TOKENS if flat else min(64, max(16, 1 << (size - 1).bit_length()))
        kind = self.kinds.setdefault(Kind(k.kind, v.kind, tile), len(self.kinds))
        total, unit = (windows * size, tile) if flat else (windows, size)
        done = 0
        while done < total:
            take = min(total - done, max(1, self._room // unit) * (tile if flat else 1))
            ends = (1, take, 0) if flat else (take, size, size)
            at = (0, done) if flat else (done, 0)
            token = start + (done if flat else done * size)
            self.rows.append([kind, token, *ends, *k.row(*at), *v.row(*at)])
            done += take
            self._spend(take if flat else take * size)

    def _spend(self, tokens: int) -> None:
        self._room -= tokens
        if self._room <= 0:
            self.close()

    def close(self) -> None:
        """End the program that rows are being added to."""
        if self.first[-1] < len(self.rows):
            self.first.append(len(self.rows))
        self._room = self.budget

    def sorted_kinds(self) -> tuple[Kind, ...]:
        """The kinds in an order that does not depend on the segments', so that fewer kernels are compiled."""
        found = list(self.kinds)
        kinds = sorted(found, reverse=True)
        for row in self.rows:
            row[0] = kinds.index(found[row[0]])
        return tuple(kinds)


def _build(layer: PackedLayer, copies: int, processors: int) -> WorkTable:
    tokens, device = layer.order.shape[1], layer.fp_k.device
    target = max(1, processors * _PROGRAMS_PER_SM // copies)
    budget = max(_LEAST, -(-tokens // target))
    budget = -(-budget // FLAT_TOKENS) * FLAT_TOKENS
    builder, start = _Builder(budget), 0
    for segment in layer.segments:
        builder.add(segment, start, layer.fp_k.dtype)
        start += segment.k.shape[2] * segment.k.shape[3]
    builder.close()
    if not builder.rows:
        return WorkTable(layer.order, layer.order, (), 0, budget)
    kinds = builder.sorted_kinds()
    rows, first = (torch.tensor(x, dtype=torch.int64).to(device) for x in (builder.rows, builder.first))
    return WorkTable(rows, first, kinds, len(builder.first) - 1, budget)


_Key = tuple[int, ...]
_TABLES: dict[_Key, tuple[WorkTable, list[weakref.ref[Segment]]]] = {}


def _forget(key: _Key, _: object) -> None:
    _TABLES.pop(key, None)


def work_table(layer: PackedLayer, copies: int, processors: int) -> WorkTable:
    """The table of a layer's segments for `copies` programs side by side (KV heads, requests, blocks of rows).

    Made anew only if the segments are new: a segment does not change, and takes the tables it is in along when it goes.
    Raises UserError if a segment's tensors are laid out or typed unlike the quantizer's.
    """
    key = (copies, processors, *map(id, layer.segments))
    if not layer.segments:
        return _build(layer, copies, processors)
    if key not in _TABLES:
        table = _build(layer, copies, processors)
        _TABLES[key] = table, [weakref.ref(s, partial(_forget, key)) for s in layer.segments]
    return _TABLES[key][0]
