"""The backends that run on any CPU against attention over the dequantized K and V."""

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.build import Case, Shape, build, causal, plain_attention, queries, relative_error
from tests.kernels.drawn import Drawn, drawn
from windowquant.core.packed import PackedLayer
from windowquant.core.quantizer import Granularity
from windowquant.kernels import Backend, get_backend, reference

TOLERANCE = 1e-5
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MIXED = (16, 4, 2, 2, 4, 16, 2)


@pytest.fixture(params=["reference", "cpu"])
def attend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


def _columns(case: Case) -> int:
    return case.k.shape[2]


def _error(attend: Backend, case: Case, shape: Shape, count: int, mask: Tensor | None = None) -> float:
    q, scaling = queries(shape, count), shape.channels**-0.5
    expected = plain_attention(q, case, causal(count, _columns(case)) if mask is None else mask, scaling)
    return relative_error(attend(q, case.layer, mask, scaling), expected)


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("channels", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("count", [1, 5])
def test_equals_attention_over_dequantized_kv(attend: Backend, group: int, channels: int, count: int) -> None:
    shape = Shape(group=group, channels=channels)
    assert _error(attend, build(shape, MIXED), shape, count) <= TOLERANCE


@pytest.mark.parametrize(
    "bits",
    [(), (16,), (2,), (4,), (16, 16), (2, 2, 2), (4, 2), (8, 4, 2, 16), (1, 1)],
    ids=lambda bits: "-".join(map(str, bits)) or "none",
)
@pytest.mark.parametrize("count, tail", [(1, 1), (1, 6), (3, 3), (3, 6)])
def test_any_mix_of_segments_empty_ones_included(attend: Backend, bits: tuple[int, ...], count: int, tail: int) -> None:
    shape = Shape(tail=tail, window=3)
    assert _error(attend, build(shape, bits), shape, count) <= TOLERANCE


def test_no_token_in_16_bit(attend: Backend) -> None:
    shape = Shape(tail=0)
    case = build(shape, (2, 4, 2))
    assert case.layer.fp_k.shape[2] == 0
    mask = torch.ones(1, 1, 2, _columns(case), dtype=torch.bool)
    assert _error(attend, case, shape, 2, mask) <= TOLERANCE


@settings(max_examples=60, deadline=None)
@given(drawn(7, st.integers(1, 9), (8, 32, 80), st.integers(1, 6), 6, DTYPES, masked=st.just(True)))
def test_any_window_order_and_any_bits_of_k_and_v(one: Drawn) -> None:
    case, mask = one.made()
    assert _error(reference.attend, case, one.shape, one.count, mask) <= TOLERANCE


def test_stored_order_changes_nothing_but_rounding(attend: Backend) -> None:
    shape = Shape(window=8)
    q = queries(shape, 1)
    results = [attend(q, build(shape, MIXED, shuffle=shuffle).layer, None, 0.2) for shuffle in (False, True)]
    assert relative_error(results[1], results[0].double()) <= TOLERANCE


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("padding", [None, [0, 7]])
@pytest.mark.parametrize(("granularity", "tolerance"), [("window_channel", 1e-6), ("token", 3e-6)])
def test_windows_in_place_give_the_reordered_layers_output(
    attend: Backend, count: int, padding: list[int] | None, granularity: Granularity, tolerance: float
) -> None:
    """Up to the order in which float32 sums are taken."""
    shape = Shape(batch=2, group=7, channels=64, window=8)
    bits = (16, 2, 16, 16, 4, 2, 8, 2, 4, 16)
    reordered, apart = (build(shape, bits, granularity, dtype=torch.float32, in_place=x) for x in (False, True))
    assert [len(case.layer.segments) for case in (reordered, apart)] == [4, 9]
    mask = None if padding is None else _left_padded(apart, count, padding)
    q, scaling = queries(shape, count), shape.channels**-0.5
    got, expected = (attend(q, case.layer, mask, scaling) for case in (apart, reordered))
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("count", [1, 4])
def test_no_mask_is_causal_among_the_queries(attend: Backend, count: int) -> None:
    shape = Shape(tail=6)
    case = build(shape, MIXED)
    q = queries(shape, count)
    torch.testing.assert_close(
        attend(q, case.layer, None, 0.2),
        attend(q, case.layer, causal(count, _columns(case)), 0.2),
        atol=1e-6,
        rtol=1e-5,
    )


@pytest.mark.parametrize("fill", [-torch.inf, torch.finfo(torch.float16).min, torch.finfo(torch.float32).min])
def test_additive_mask_equals_bool_mask(attend: Backend, fill: float) -> None:
    shape = Shape(batch=2)
    case = build(shape, MIXED)
    mask = torch.rand(2, 1, 3, _columns(case)) > 0.3
    q = queries(shape, 3)
    additive = torch.zeros(mask.shape).masked_fill(~mask, fill)
    assert relative_error(attend(q, case.layer, additive, 0.2), attend(q, case.layer, mask, 0.2).double()) <= 1e-6


def test_additive_bias_is_added(attend: Backend) -> None:
    shape = Shape()
    case = build(shape, MIXED)
    assert _error(attend, case, shape, 2, torch.randn(1, 1, 2, _columns(case))) <= TOLERANCE


def _left_padded(case: Case, count: int, padding: list[int]) -> Tensor:
    mask = causal(count, _columns(case)).repeat(len(padding), 1, 1, 1)
    for row, columns in zip(mask, padding, strict=True):
        row[..., :columns] = False
    return mask


@pytest.mark.parametrize("count", [1, 5])
def test_batch_with_left_padding(attend: Backend, count: int) -> None:
    shape = Shape(batch=3)
    case = build(shape, MIXED)
    mask = _left_padded(case, count, [0, 2, 9])
    assert _error(attend, case, shape, count, mask) <= TOLERANCE


@pytest.mark.parametrize("additive", [False, True])
def test_query_that_sees_nothing_is_finite_and_disturbs_nobody(attend: Backend, additive: bool) -> None:
    shape = Shape(batch=2)
    case = build(shape, MIXED)
    bool_mask = _left_padded(case, 4, [0, _columns(case) - 2])
    mask = torch.zeros(bool_mask.shape).masked_fill(~bool_mask, -torch.inf) if additive else bool_mask
    q = queries(shape, 4)
    got, expected = attend(q, case.layer, mask, 0.2), plain_attention(q, case, mask, 0.2)
    blind = expected.isnan()
    assert int(blind.any(-1).any(1).sum()) == 2 and bool(got.isfinite().all())
    assert relative_error(got[~blind], expected[~blind]) <= TOLERANCE


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("masked", [None, "bool", "additive"])
def test_empty_slots_are_never_attended(attend: Backend, count: int, masked: str | None) -> None:
    """Row 1 has one window of two bits less than row 0, and one 16-bit token less: slots, whatever they hold."""
    shape = Shape(batch=2)
    case = build(shape, (4, 2, 2), shuffle=False)
    slots = torch.zeros(2, _columns(case), dtype=torch.bool)
    slots[1, 8:13] = True  # window 2, and the first token of the 16-bit block
    order = case.layer.order.masked_fill(slots, -1)
    case.layer.fp_k[1, :, 0] = case.layer.fp_v[1, :, 0] = 60000
    visible = causal(count, _columns(case)) & ~slots[:, None, None]
    given_mask = causal(count, _columns(case))
    mask = {
        None: None,
        "bool": given_mask,
        "additive": torch.zeros(given_mask.shape).masked_fill(~given_mask, -torch.inf),
    }[masked]
    q = queries(shape, count)
    got = attend(q, replace(case.layer, order=order), mask, 0.2)
    assert relative_error(got, plain_attention(q, case, visible, 0.2)) <= TOLERANCE


@pytest.mark.parametrize("granularity", get_args(Granularity))
def test_working_through_windows_in_pieces(granularity: Granularity, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(batch=2)
    case = build(shape, MIXED, granularity)
    q = queries(shape, 3)
    apart = build(shape, MIXED, granularity, in_place=True)
    whole, whole_apart = (reference.attend(q, x.layer, None, 0.2) for x in (case, apart))
    monkeypatch.setattr(reference, "_CHUNK", 1)
    torch.testing.assert_close(reference.attend(q, case.layer, None, 0.2), whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(reference.attend(q, apart.layer, None, 0.2), whole_apart, atol=1e-6, rtol=1e-5)


class _Largest(TorchDispatchMode):
    """Records the most elements that any floating-point result has."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.is_floating_point():
            self.elements = max(self.elements, result.numel())
        return result


def test_no_dequantized_segment_ever_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(channels=64, window=32)
    case = build(shape, (4,) * 12 + (2,) * 12)
    window = shape.heads * shape.window * shape.channels
    monkeypatch.setattr(reference, "_CHUNK", 2 * window)
    with _Largest() as largest:
        reference.attend(queries(shape, 1), case.layer, None, 0.2)
    assert largest.elements <= 2 * window


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_result_has_the_dtype_of_the_queries(attend: Backend, dtype: torch.dtype) -> None:
    shape = Shape()
    case = build(shape, MIXED)
    q = queries(shape, 2).to(dtype)
    got = attend(q, case.layer, None, 0.2)
    assert got.dtype == dtype and got.shape == q.shape
    expected = plain_attention(q, case, causal(2, _columns(case)), 0.2)
    assert relative_error(got, expected) <= TOLERANCE + torch.finfo(dtype).eps


def test_views_of_a_growing_buffer_and_transposed_queries(attend: Backend) -> None:
    shape = Shape(batch=2)
    case = build(shape, MIXED)
    layer = case.layer
    room = torch.full((2, shape.heads, layer.fp_k.shape[2] + 7, shape.channels), torch.nan, dtype=torch.float16)
    k, v = room.clone(), room.clone()
    k[:, :, :-7], v[:, :, :-7] = layer.fp_k, layer.fp_v
    grown = PackedLayer(k[:, :, :-7], v[:, :, :-7], layer.segments, layer.order)
    q = queries(shape, 3)
    strided = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(attend(strided, grown, None, 0.2), attend(q, layer, None, 0.2))


def test_queries_that_carry_a_gradient_are_taken(attend: Backend) -> None:
    shape = Shape()
    case = build(shape, MIXED)
    q = queries(shape, 1)
    got = attend(q.clone().requires_grad_(), case.layer, None, 0.2)
    assert torch.equal(got, attend(q, case.layer, None, 0.2)) and not got.requires_grad
