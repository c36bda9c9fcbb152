"""Quantizing in one launch: the quantizer's own block, bit for bit.

The quantizer runs on the CPU throughout: on a CUDA device PyTorch may divide by multiplying with a reciprocal.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.quantizer import Granularity, ZeroPoint, quantize
from windowquant.errors import UserError
from windowquant.kernels.triton_quantize import quantize_windows


def _gathered(x: Tensor, columns: Tensor) -> Tensor:
    """The windows of x [B, H, T, D] at columns [B, W, S], one by one."""
    rows = [torch.stack([x[b, :, window.clamp(min=0)] for window in row], 1) for b, row in enumerate(columns)]
    return torch.stack(rows)


def _assert_same(got: WindowBlock, expected: WindowBlock) -> None:
    assert (got.bits, got.shape, got.granularity) == (expected.bits, expected.shape, expected.granularity)
    for name in ("codes", "scale", "offset"):
        ours, theirs = getattr(got, name).cpu(), getattr(expected, name)
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name


@settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.sampled_from([8, 4, 2, 1]),
    granularity=st.sampled_from(["window_channel", "token"]),
    zero_point=st.sampled_from(["integer", "float", "symmetric"]),
    dtypes=st.sampled_from(
        [
            (torch.float16, torch.float16),
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float16),
            (torch.bfloat16, torch.float16),
        ]
    ),
    sizes=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.sampled_from([1, 3, 16, 17])),
    channels=st.sampled_from([8, 32, 80, 128]),
    spread=st.sampled_from([1.0, 1e-3, 1e-6, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_the_quantizers_own_block(
    bits: int,
    granularity: Granularity,
    zero_point: ZeroPoint,
    dtypes: tuple[torch.dtype, torch.dtype],
    sizes: tuple[int, int, int, int],
    channels: int,
    spread: float,
    seed: int,
    device: torch.device,
) -> None:
    bits = 2 if zero_point == "symmetric" and bits == 1 else bits
    (batch, heads, windows, size), (given_dtype, dtype) = sizes, dtypes
    generator = torch.Generator().manual_seed(seed)
    tokens = windows * size + 3
    x = torch.randn(batch, heads, tokens, channels, generator=generator) * spread
    x[..., 3] += 30  # far from zero: a large integer zero point
    x[..., 5] = 1.5  # constant: scale zero
    x = x.to(given_dtype)
    drawn = [torch.randperm(tokens, generator=generator)[: windows * size] for _ in range(batch)]
    columns = torch.stack(drawn).view(batch, windows, size)
    columns[-1, 0, 0] = -1
    expected = quantize(_gathered(x, columns).to(dtype), bits, granularity, zero_point)
    got = quantize_windows(x.to(device), columns, bits, granularity, zero_point, dtype)
    _assert_same(got, expected)


@pytest.mark.parametrize("granularity", ["window_channel", "token"])
@pytest.mark.parametrize("bits", [4, 1])
def test_windows_longer_than_a_tile(granularity: Granularity, bits: int, device: torch.device) -> None:
    x = torch.randn(1, 1, 600, 32, generator=torch.Generator().manual_seed(0)).half()
    columns = torch.arange(600).flip(0).view(1, 2, 300)
    got = quantize_windows(x.to(device), columns, bits, granularity)
    _assert_same(got, quantize(_gathered(x, columns), bits, granularity))


@pytest.mark.parametrize("peak", [0.5, 2.0, 1.2345])
def test_a_peak_known_beforehand(peak: float, device: torch.device) -> None:
    x = torch.randn(1, 2, 16, 32, generator=torch.Generator().manual_seed(0)).half()
    columns = torch.arange(16).view(1, 2, 8)
    got = quantize_windows(x.to(device), columns, 4, zero_point="symmetric", peak=peak)
    _assert_same(got, quantize(_gathered(x, columns), 4, zero_point="symmetric", peak=peak))


def test_a_view_with_distant_channels_and_no_window(device: torch.device) -> None:
    x = torch.randn(1, 2, 32, 8, generator=torch.Generator().manual_seed(0)).half().to(device).mT
    columns = torch.arange(8).view(1, 1, 8)
    _assert_same(quantize_windows(x, columns, 4), quantize(_gathered(x.cpu(), columns), 4))
    assert quantize_windows(x, columns[:, :0], 4).codes.shape == (1, 2, 0, 8, 16)


@pytest.mark.parametrize(("flaw", "kind"), [(torch.nan, "NaN"), (torch.inf, "infinity"), (-torch.inf, "infinity")])
@pytest.mark.parametrize("granularity", ["window_channel", "token"])
def test_values_that_are_not_finite(flaw: float, kind: str, granularity: Granularity, device: torch.device) -> None:
    x = torch.randn(1, 2, 16, 32).half()
    x[0, 1, 7, 9] = flaw
    columns = torch.arange(16).view(1, 2, 8)
    with pytest.raises(UserError, match=f"layer 3 K holds {kind} and cannot be quantized"):
        quantize_windows(x.to(device), columns, 4, granularity, label="layer 3 K")
    kept = torch.tensor([i for i in range(16) if i != 7]).view(1, 1, 15)
    assert quantize_windows(x.to(device), kept, 4, granularity).codes.shape == (1, 2, 1, 15, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "tensor"}, "takes the granularities window_channel, token, not 'tensor'"),
        ({"zero_point": "none"}, "zero_point is 'none'"),
        ({"bits": 1, "zero_point": "symmetric"}, "Symmetric codes of 1 bit"),
        ({"bits": 3}, "Codes of 3 bits cannot be packed"),
        ({"dtype": torch.float32}, "would be stored in torch.float32"),
    ],
)
def test_what_cannot_be_made(options: dict[str, object], message: str, device: torch.device) -> None:
    x = torch.zeros(1, 1, 4, 32, dtype=torch.float16, device=device)
    with pytest.raises(UserError, match=message):
        quantize_windows(x, torch.arange(4).view(1, 1, 4), **{"bits": 4, **options})  # type: ignore[arg-type]
