"""Attention over a packed layer against attention over the dequantized K and V in float64."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.build import Case, Shape, build, causal, plain_attention, queries, relative_error
from tests.kernels.drawn import Drawn, drawn
from tests.kernels.triton_grid.on_device import answer, error, moved
from windowquant.core.packed import PackedLayer
from windowquant.core.quantizer import Granularity
from windowquant.errors import UserError
from windowquant.kernels import triton_attention, triton_table
from windowquant.kernels.triton_attention import attend

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIXED = (16, 4, 2, 2, 4, 16, 2)


def _columns(case: Case) -> int:
    return case.k.shape[2]


@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("group", "count"), [(7, 1), (1, 5), (7, 3)])
def test_head_dims_and_groups(channels: int, group: int, count: int, device: torch.device) -> None:
    shape = Shape(group=group, channels=channels)
    assert error(build(shape, MIXED), shape, count, device) <= 1


@pytest.mark.parametrize(
    "bits",
    [(), (16,), (2,), (4,), (16, 16), (2, 2, 2), (8, 4, 2, 16), (1, 1)],
    ids=lambda bits: "-".join(map(str, bits)) or "none",
)
@pytest.mark.parametrize(("count", "tail"), [(1, 1), (3, 6)])
def test_any_mix_of_segments_empty_ones_included(
    bits: tuple[int, ...], count: int, tail: int, device: torch.device
) -> None:
    shape = Shape(tail=tail, window=3)
    assert error(build(shape, bits), shape, count, device) <= 1


def test_no_token_in_16_bit(device: torch.device) -> None:
    shape = Shape(tail=0)
    case = build(shape, (2, 4, 2))
    mask = torch.ones(1, 1, 2, _columns(case), dtype=torch.bool)
    assert error(case, shape, 2, device, mask) <= 1


@pytest.mark.parametrize("window", [1, 16, 17, 70])
@pytest.mark.parametrize("granularity", get_args(Granularity))
def test_window_sizes_and_granularities(window: int, granularity: Granularity, device: torch.device) -> None:
    shape = Shape(window=window, heads=1)
    assert error(build(shape, (4, 2, 4), granularity), shape, 2, device) <= 1


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(one=drawn(5, st.integers(1, 9), (8, 32, 80), st.integers(1, 6), 4, DTYPES, masked=st.just(True), heads=2))
def test_any_window_order_and_any_bits_of_k_and_v(one: Drawn, device: torch.device) -> None:
    case, mask = one.made()
    assert error(case, one.shape, one.count, device, mask) <= 1


@pytest.mark.parametrize("granularity", ["window_channel", "token"])
def test_symmetric_codes(granularity: Granularity, device: torch.device) -> None:
    shape = Shape(group=7, channels=64)
    case = build(shape, (8, 4, 16, 2, 4), granularity, "symmetric", in_place=True)
    assert error(case, shape, 2, device) <= 1


@pytest.mark.parametrize("count", [1, 20])
def test_many_shares_and_many_rows(count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 queries of 7 heads are three blocks of rows; programs of 32 tokens are many shares, some of several runs."""
    monkeypatch.setattr(triton_table, "_LEAST", 32)
    monkeypatch.setattr(triton_table, "_PROGRAMS_PER_SM", 1000)
    shape = Shape(heads=1, group=7, window=16, tail=40)
    for in_place in (False, True):
        case = build(shape, (4, 2, 2, 16, 4, 4, 2), in_place=in_place)
        assert error(case, shape, count, device) <= 1


def _left_padded(case: Case, count: int, padding: list[int]) -> torch.Tensor:
    mask = causal(count, _columns(case)).repeat(len(padding), 1, 1, 1)
    for row, columns in zip(mask, padding, strict=True):
        row[..., :columns] = False
    return mask


@pytest.mark.parametrize("count", [1, 5])
def test_batch_with_left_padding(count: int, device: torch.device) -> None:
    shape = Shape(batch=3)
    case = build(shape, MIXED)
    assert error(case, shape, count, device, _left_padded(case, count, [0, 2, 9])) <= 1


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float16).min, torch.finfo(torch.float32).min])
def test_additive_mask_equals_bool_mask(fill: float, device: torch.device) -> None:
    shape = Shape(batch=2)
    case = build(shape, MIXED)
    mask = torch.rand(2, 1, 3, _columns(case)) > 0.3
    q = queries(shape, 3).half()
    additive = torch.zeros(mask.shape).masked_fill(~mask, fill)
    got, expected = (answer(q, case.layer, x, 0.2, device) for x in (additive, mask))
    assert relative_error(got, expected.double()) <= 1e-6


def test_additive_bias_is_added(device: torch.device) -> None:
    shape = Shape()
    case = build(shape, MIXED)
    assert error(case, shape, 2, device, torch.randn(1, 1, 2, _columns(case))) <= 1


@pytest.mark.parametrize("additive", [False, True])
def test_query_that_sees_nothing_is_finite_and_disturbs_nobody(additive: bool, device: torch.device) -> None:
    shape = Shape(batch=2)
    case = build(shape, MIXED)
    bool_mask = _left_padded(case, 4, [0, _columns(case) - 2])
    mask = torch.zeros(bool_mask.shape).masked_fill(~bool_mask, -torch.inf) if additive else bool_mask
    q = queries(shape, 4).half()
    got, expected = answer(q, case.layer, mask, 0.2, device), plain_attention(q, case, mask, 0.2)
    blind = expected.isnan()
    assert int(blind.any(-1).any(1).sum()) == 2 and bool(got.isfinite().all())
    assert relative_error(got[~blind], expected[~blind]) <= 2e-3


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("masked", [None, "bool", "additive"])
def test_empty_slots_are_never_attended(count: int, masked: str | None, device: torch.device) -> None:
    shape = Shape(batch=2)
    case = build(shape, (4, 2, 2), shuffle=False)
    slots = torch.zeros(2, _columns(case), dtype=torch.bool)
    slots[1, 8:13] = True  # window 2, and the first token of the 16-bit block
    order = case.layer.order.masked_fill(slots, -1)
    case.layer.fp_k[1, :, 0] = case.layer.fp_v[1, :, 0] = 60000
    seen = causal(count, _columns(case))
    mask = {None: None, "bool": seen, "additive": torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)}[masked]
    q = queries(shape, count).half()
    got = answer(q, replace(case.layer, order=order), mask, 0.2, device)
    assert relative_error(got, plain_attention(q, case, seen & ~slots[:, None, None], 0.2)) <= 2e-3


def test_an_order_of_no_memory_without_mask_and_slots(device: torch.device) -> None:
    """What the cache hands over where nothing but the shape of `order` matters."""
    shape = Shape(batch=2)
    case = build(shape, MIXED)
    q = queries(shape, 3).half()
    bare = replace(case.layer, order=torch.zeros(1, 1, dtype=torch.int64).expand(2, _columns(case)))
    assert torch.equal(answer(q, bare, None, 0.2, device), answer(q, case.layer, None, 0.2, device))


def test_views_of_a_growing_buffer_and_transposed_queries(device: torch.device) -> None:
    shape = Shape(batch=2)
    layer = moved(build(shape, MIXED).layer, device)
    room = torch.full((2, shape.heads, layer.fp_k.shape[2] + 7, shape.channels), torch.nan, dtype=torch.float16)
    k, v = room.clone().to(device), room.clone().to(device)
    k[:, :, :-7], v[:, :, :-7] = layer.fp_k, layer.fp_v
    grown = PackedLayer(k[:, :, :-7], v[:, :, :-7], layer.segments, layer.order)
    q = queries(shape, 3).half().to(device)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(strided, grown, None, 0.2), attend(q, layer, None, 0.2))


class _Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [1, 3])
def test_the_launcher_reads_no_values(count: int, device: torch.device) -> None:
    shape = Shape(batch=2)
    layer = moved(build(shape, MIXED).layer, device)
    q = queries(shape, count).half().to(device)
    mask = causal(count, layer.order.shape[1]).to(device)
    with _Waits() as waits:
        attend(q, layer, None, 0.2)
        attend(q, layer, mask, 0.2)
        assert waits.count == 0
        int(layer.order.amin())
    assert waits.count == 1


class _Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.launches = kernel, 0

    def __getitem__(self, grid: Any) -> Any:
        self.launches += 1
        return self.kernel[grid]


@pytest.mark.parametrize("in_place", [False, True])
def test_one_launch_and_a_combine(in_place: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {name: _Counted(getattr(triton_attention, name)) for name in ("attend_kernel", "combine_kernel")}
    for name, kernel in counted.items():
        monkeypatch.setattr(triton_attention, name, kernel)
    shape = Shape()
    case = build(shape, (16, 2, 4, 2, 16, 8, 2, 1), in_place=in_place)
    assert error(case, shape, 1, device) <= 1
    assert [kernel.launches for kernel in counted.values()] == [1, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: q.double(), "float16, bfloat16 or float32, not torch.float64"),
        (lambda q: q[..., :16], "do not fit a layer of 1 requests, 2 KV heads and head_dim 32"),
        (lambda q: q[:, :5], "give .1, a multiple of 2, tokens, 32."),
    ],
)
def test_queries_that_cannot_be_taken(change: Any, message: str, device: torch.device) -> None:
    shape = Shape()
    layer = moved(build(shape, MIXED).layer, device)
    with pytest.raises(UserError, match=message):
        attend(change(queries(shape, 1).half().to(device)), layer, None, 0.2)


def test_heads_that_are_too_wide(device: torch.device) -> None:
    shape = Shape(channels=320, heads=1, group=1)
    layer = moved(build(shape, (4,)).layer, device)
    with pytest.raises(UserError, match="head_dim up to 256, not 320"):
        attend(queries(shape, 1).half().to(device), layer, None, 0.2)


def test_nothing_stored(device: torch.device) -> None:
    shape = Shape(tail=0)
    layer = moved(build(shape, ()).layer, device)
    assert attend(queries(shape, 1).to(device), layer, None, 0.2).abs().sum() == 0
