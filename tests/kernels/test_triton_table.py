"""The work table of the Triton kernels: every token once, at its address, in shares of about one size."""

import gc
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.build import Shape, build
from windowquant.core.packed import PackedLayer, WindowBlock
from windowquant.core.quantizer import Granularity
from windowquant.errors import UserError
from windowquant.kernels import triton_table
from windowquant.kernels.triton_table import FLAT_TOKENS, Kind, SideKind, WorkTable, work_table

GRANULARITIES = get_args(Granularity)


def _tokens(layer: PackedLayer) -> list[tuple[int, int, int]]:
    """Segment, window and place in it of every quantized token, in stored order."""
    blocks = [segment.k for segment in layer.segments]
    return [(i, w, s) for i, block in enumerate(blocks) for w in range(block.shape[2]) for s in range(block.shape[3])]


def _groups(block: WindowBlock, groups: torch.Tensor, b: int, h: int, w: int, s: int) -> int:
    """Address of the scale (or offset) of a token's first channel."""
    own = [min(i, size - 1) for i, size in zip((b, h, w, s, 0), groups.shape, strict=True)]
    return groups[tuple(own)].data_ptr() if groups.ndim == 5 else 0


def _check_side(
    block: WindowBlock, fields: list[int], kind: SideKind, at: tuple[int, int], token: tuple[int, ...]
) -> None:
    """A table row's half finds its run's token `at` (window, place) where the block has it."""
    (b, h, w, s), (window, place) = token, at
    codes, scale, offset, cb, ch, cw, cs, sb, sh, sw, ss = fields
    assert kind.bits == block.bits and kind.symmetric == block.symmetric
    assert codes % kind.align == 0 and kind.align in (1, 2, 4, 8, 16)
    reached = codes + (b * cb + h * ch + window * cw + place * cs) * block.codes.element_size()
    assert reached == block.codes[b, h, w, s].data_ptr()
    if kind.bits < 16:
        step = (b * sb + h * sh + window * sw + place * ss) * block.scale.element_size()
        assert scale + step == _groups(block, block.scale, b, h, w, s)
        if not kind.symmetric:
            assert offset + step == _groups(block, block.offset, b, h, w, s)


def _check(layer: PackedLayer, table: WorkTable) -> None:
    stored, found = _tokens(layer), []
    for kind_index, start, windows, size, span, *sides in table.rows.tolist() if table.programs else []:
        kind = table.kinds[kind_index]
        for window in range(windows):
            for place in range(size):
                number = start + window * span + place
                found.append(number)
                i, w, s = stored[number]
                for b in range(layer.fp_k.shape[0]):
                    token = (b, layer.fp_k.shape[1] - 1, w, s)
                    _check_side(layer.segments[i].k, sides[:11], kind.k, (window, place), token)
                    _check_side(layer.segments[i].v, sides[11:], kind.v, (window, place), token)
    assert sorted(found) == list(range(len(stored)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    bits=st.lists(st.tuples(*[st.sampled_from([16, 8, 4, 2, 1])] * 2), max_size=9),
    in_place=st.booleans(),
    window=st.integers(1, 40),
    granularity=st.sampled_from(GRANULARITIES),
    processors=st.sampled_from([1, 2, 100]),
)
def test_every_token_once_where_it_lies(
    bits: list[tuple[int, int]], in_place: bool, window: int, granularity: Granularity, processors: int
) -> None:
    shape = Shape(batch=2, channels=16, window=window)
    k_bits, v_bits = [k for k, _ in bits], [v for _, v in bits]
    layer = build(shape, k_bits, granularity, v_bits=v_bits, in_place=in_place).layer
    table = work_table(layer, 2, processors)
    _check(layer, table)
    assert table.budget >= 128 and table.budget % FLAT_TOKENS == 0
    if table.programs:
        first = table.first.tolist()
        assert (first[0], first[-1], len(first)) == (0, len(table.rows), table.programs + 1)
        for begin, end in pairwise(first):
            held = sum(row[2] * row[3] for row in table.rows[begin:end].tolist())
            assert 0 < held < table.budget + max(window, FLAT_TOKENS)


@pytest.mark.parametrize("copies", [1, 8, 100])
def test_enough_programs_to_fill_the_device_and_no_more(copies: int) -> None:
    shape = Shape(heads=1, channels=16, window=16, tail=0)
    layer = build(shape, (4, 2) * 200).layer
    table, wanted = work_table(layer, copies, 8), max(1, 32 // copies)
    assert 0.9 * wanted <= table.programs <= wanted and table.budget >= 6400 / wanted


def test_symmetric_codes_have_no_offset() -> None:
    layer = build(Shape(channels=16), (4, 2, 8), zero_point="symmetric", in_place=True).layer
    _check(layer, work_table(layer, 1, 1))


def test_scales_that_do_not_change_with_the_window_make_large_tiles() -> None:
    kinds = {
        name: work_table(build(Shape(window=20, channels=16), (4, 4), name).layer, 1, 1).kinds for name in GRANULARITIES
    }
    side = {name: SideKind(4, groups, False, 8) for name, groups in
            zip(GRANULARITIES, ("channel", "token", "token", "channel", "whole", "whole"), strict=True)}  # fmt: skip
    tiles = {name: 32 for name in GRANULARITIES}
    assert kinds == {name: (Kind(side[name], side[name], tiles[name]),) for name in GRANULARITIES}
    by_window = build(Shape(window=5, channels=16), (4, 4)).layer
    assert work_table(by_window, 1, 1).kinds[0].tile == 16


def test_made_once_for_the_segments_and_gone_with_them() -> None:
    gc.collect()
    before = len(triton_table._TABLES)
    layer = build(Shape(channels=16), (4, 2)).layer
    table = work_table(layer, 1, 1)
    later = replace(layer, fp_k=layer.fp_k.repeat(1, 1, 2, 1))
    assert work_table(later, 1, 1) is table and work_table(layer, 2, 1) is not table
    other = replace(layer, segments=(*layer.segments[:-1], replace(layer.segments[-1])))
    assert work_table(other, 1, 1) is not table
    assert len(triton_table._TABLES) == before + 3
    del layer, later, other
    gc.collect()
    assert len(triton_table._TABLES) == before


def test_kinds_do_not_depend_on_the_order_of_segments() -> None:
    one, other = (build(Shape(channels=16), bits, in_place=True).layer for bits in ((4, 2, 16), (16, 2, 4)))
    assert work_table(one, 1, 1).kinds == work_table(other, 1, 1).kinds


def test_what_the_quantizer_would_not_make() -> None:
    layer = build(Shape(channels=16), (4,)).layer
    segment = next(s for s in layer.segments if s.k.shape[2])
    strided = replace(segment.k, codes=segment.k.codes.transpose(-1, -2).contiguous().transpose(-1, -2))
    for k, message in (
        (strided, "make it contiguous"),
        (replace(segment.k, scale=segment.k.scale.float()), "one dtype"),
    ):
        wrong = replace(layer, segments=(replace(segment, k=k),))
        with pytest.raises(UserError, match=f"K of a segment.*{message}"):
            work_table(wrong, 1, 1)
