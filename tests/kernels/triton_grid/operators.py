"""The two fused operators, and the way that is not fused, against plain products in float64."""

import pytest
import torch
from torch import Tensor

from tests.kernels.build import Case, Shape, build, causal, plain_attention, queries, relative_error
from tests.kernels.triton_grid.on_device import moved
from windowquant.core.quantizer import Granularity
from windowquant.errors import UserError
from windowquant.kernels import triton_table
from windowquant.kernels.triton_operators import scores, weighted
from windowquant.kernels.triton_unfused import attend_unfused, dequantized

BITS = (16, 4, 2, 2, 8, 16, 1)
TOLERANCE = 2e-3


def _stored(case: Case) -> tuple[Tensor, Tensor]:
    """K and V of the case in stored order; all its rows share one."""
    order = case.layer.order[0]
    return case.k[:, :, order], case.v[:, :, order]


def _scores(q: Tensor, case: Case, scaling: float) -> Tensor:
    k = _stored(case)[0]
    return torch.einsum("bhgtd,bhnd->bhgtn", q.double().unflatten(1, (k.shape[1], -1)), k).flatten(1, 2) * scaling


@pytest.mark.parametrize("granularity", ["window_channel", "token", "tensor"])
@pytest.mark.parametrize(("channels", "count"), [(64, 1), (80, 3)])
def test_scores_and_weighted_sum(
    granularity: Granularity, channels: int, count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_table, "_LEAST", 8)
    monkeypatch.setattr(triton_table, "_PROGRAMS_PER_SM", 1000)
    shape = Shape(batch=2, group=7, channels=channels, window=5)
    case = build(shape, BITS, granularity)
    layer, q = moved(case.layer, device), queries(shape, count).half()
    expected = _scores(q, case, 0.2)
    got = scores(q.to(device), layer, 0.2)
    assert got.dtype == torch.float32 and relative_error(got.cpu(), expected) <= TOLERANCE
    p = expected.softmax(-1)
    values = torch.einsum("bhgtn,bhnd->bhgtd", p.unflatten(1, (shape.heads, -1)), _stored(case)[1]).flatten(1, 2)
    summed = weighted(p.float().to(device), layer, torch.float16)
    assert summed.dtype == torch.float16 and relative_error(summed.cpu(), values) <= TOLERANCE


def test_weights_of_another_length(device: torch.device) -> None:
    shape = Shape()
    layer = moved(build(shape, BITS).layer, device)
    with pytest.raises(UserError, match="There are 3 weights a query for 33 stored tokens"):
        weighted(torch.ones(1, 6, 1, 3, device=device), layer, torch.float16)


@pytest.mark.parametrize("granularity", ["window_channel", "token", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dequantized(granularity: Granularity, dtype: torch.dtype, device: torch.device) -> None:
    case = build(Shape(batch=2, channels=80, window=5), BITS, granularity, dtype=dtype)
    for got, expected in zip(dequantized(moved(case.layer, device)), _stored(case), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.cpu(), expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_attention_that_is_not_fused(mask: str | None, device: torch.device) -> None:
    shape = Shape(batch=2, group=7)
    case = build(shape, BITS)
    q, seen = queries(shape, 3).half(), causal(3, case.k.shape[2])
    if mask:
        seen = seen.repeat(2, 1, 1, 1)
        seen[1, ..., :4] = False
    given = seen if mask == "bool" else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    got = attend_unfused(q.to(device), moved(case.layer, device), given.to(device) if mask else None, 0.2)
    assert got.dtype == torch.float16
    assert relative_error(got.cpu(), plain_attention(q, case, seen, 0.2)) <= TOLERANCE
