"""Products by integers on the CPU: what they are exact to, and when they are not used."""

from dataclasses import replace

import numba
import numpy as np
import pytest
import torch

from tests.kernels.build import Shape, build, causal, plain_attention, queries, relative_error
from windowquant.core.quantizer import dequantize
from windowquant.kernels.cpu import amx, attention, integer
from windowquant.kernels.cpu.attention import attend
from windowquant.kernels.cpu.primitives import pointer

tiles = pytest.mark.skipif(not amx.available(), reason="the processor has no tiles for integers")
SHAPE = Shape(batch=2, group=7, channels=64, window=32, tail=3)


@pytest.fixture(autouse=True)
def integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for float32, whose own rounding hides no error."""
    monkeypatch.setattr(attention, "_by_integers", lambda q: amx.available())


@tiles
@pytest.mark.parametrize("rows", [1, 4, 7, 8, 20])
@pytest.mark.parametrize("channels", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_every_width_and_number_of_rows(bits: int, channels: int, rows: int) -> None:
    """Also where a head_dim does not fill tiles, or a row of codes is too short: floats are multiplied there."""
    shape = replace(SHAPE, group=rows, channels=channels)
    case, q = build(shape, (bits,) * 5), queries(shape, 1)
    expected = plain_attention(q, case, causal(1, case.k.shape[2]), channels**-0.5)
    assert relative_error(attend(q, case.layer, None, channels**-0.5), expected) <= 4e-4


@tiles
@pytest.mark.parametrize(("dtype", "used"), [(torch.float16, True), (torch.bfloat16, True), (torch.float32, False)])
def test_integers_are_used_for_queries_of_16_bits(
    dtype: torch.dtype, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert attention._by_integers(torch.zeros(1, dtype=dtype)) is used
    monkeypatch.setattr(attention, "available", lambda: False)
    assert not attention._by_integers(torch.zeros(1, dtype=dtype))


@tiles
def test_integers_are_nearly_as_exact_as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    case, q = build(SHAPE, (4, 2, 8)), queries(SHAPE, 1)
    by_integers = attend(q, case.layer, None, 0.2)
    monkeypatch.setattr(attention, "_by_integers", lambda q: False)
    assert 0 < relative_error(by_integers, attend(q, case.layer, None, 0.2).double()) < 4e-4


@tiles
@pytest.mark.parametrize("scaling", [1.0, 10.0, 100.0])
def test_large_queries_are_not_rounded_to_coarse_steps(scaling: float) -> None:
    """Steps are relative to the largest score of a channel; where they are too coarse, K is multiplied by floats."""
    case, q = build(SHAPE, (4, 2) * 3), queries(SHAPE, 1)
    expected = plain_attention(q, case, causal(1, case.k.shape[2]), scaling)
    assert relative_error(attend(q, case.layer, None, scaling), expected) <= 1e-3


@tiles
def test_channels_and_windows_of_very_different_size() -> None:
    """One of them takes nearly all steps, and the others must still be counted well enough."""
    case, q = build(SHAPE, (4,) * 6, shuffle=False), queries(SHAPE, 1)
    block = next(segment.k for segment in case.layer.segments if segment.windows)
    block.scale[..., 7] *= 50
    block.scale[:, :, 3] *= 20
    read = torch.cat([dequantize(block).flatten(2, 3).double(), case.k[:, :, 6 * 32 :]], 2)
    expected = plain_attention(q, replace(case, k=read), causal(1, read.shape[2]), 0.125)
    assert relative_error(attend(q, case.layer, None, 0.125), expected) <= 1e-3


@tiles
@pytest.mark.parametrize("factor", [0.0, 1e-38, 1e-8])
def test_scales_next_to_nothing_leave_the_shift(factor: float) -> None:
    """As in a window whose tokens are all alike."""
    case, q = build(SHAPE, (4, 2), shuffle=False, dtype=torch.bfloat16), queries(SHAPE, 1)
    read = []
    for segment in case.layer.segments:
        segment.k.scale.mul_(factor)
        if segment.windows:
            read.append(dequantize(segment.k).flatten(2, 3).double())
    k = torch.cat([*read, case.k[:, :, 2 * 32 :]], 2)
    expected = plain_attention(q, replace(case, k=k), causal(1, k.shape[2]), 0.125)
    assert relative_error(attend(q, case.layer, None, 0.125), expected) <= 4e-4


@tiles
def test_queries_of_zero_take_the_mean() -> None:
    case, q = build(SHAPE, (4, 2)), queries(SHAPE, 1)
    mean = case.v.mean(2, keepdim=True).repeat_interleave(7, 1)
    assert relative_error(attend(torch.zeros_like(q), case.layer, None, 0.2), mean) <= 4e-4


@tiles
def test_products_of_other_libraries_work_in_between() -> None:
    """They keep their own tiles configured, and take that for granted."""
    case, q = build(SHAPE, (4, 2) * 3, dtype=torch.bfloat16), queries(SHAPE, 1)
    x, y = (torch.randn(64, 64, dtype=torch.bfloat16) for _ in range(2))
    product, first = x @ y, attend(q, case.layer, None, 0.2)
    for _ in range(5):
        assert torch.equal(x @ y, product)
        assert torch.equal(attend(q, case.layer, None, 0.2), first)


@numba.njit
def _nested(outer: int, inner: int, seen: np.ndarray) -> None:
    before = integer.tiles_begun(outer)
    for row in range(len(seen)):
        own = integer.tiles_begun(inner)
        seen[row] = numba.carray(pointer(own), 8)
        integer.tiles_ended(own)
    integer.tiles_ended(before)


@tiles
def test_configuration_before_is_restored() -> None:
    seen = np.zeros((2, 8), np.int64)
    _nested(integer.CONFIGS[7].ctypes.data, integer.CONFIGS[1].ctypes.data, seen)
    assert (seen.view(np.uint8) == integer.CONFIGS[7]).all()


def test_tiles_are_what_the_compiler_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    known = amx.available.__wrapped__
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx2,-amx-tile")
    assert not known()
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert not known()


def test_tiles_are_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert not amx.available.__wrapped__()


def test_configuration_of_tiles() -> None:
    got = amx.configuration({0: (14, 64), 5: (2, 32)})
    assert got.nbytes == 64 and got[0] == 1
    assert got[16:32].view(np.uint16).tolist() == [64, 0, 0, 0, 0, 32, 0, 0]
    assert got[48:56].tolist() == [14, 0, 0, 0, 0, 2, 0, 0]
