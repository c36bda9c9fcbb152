"""Layer sensitivity against a plain loop."""

import math

import pytest
import torch

from windowquant.core.sensitivity import hidden_similarity
from windowquant.errors import UserError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mean_cosine_over_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    h_in, h_out = torch.randn(9, 12).to(dtype), torch.randn(9, 12).to(dtype)
    cosines = []
    for a, b in zip(h_in.double().tolist(), h_out.double().tolist(), strict=True):
        cosines.append(sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b)))
    assert hidden_similarity(h_in, h_out) == pytest.approx(sum(cosines) / 9, abs=1e-6)


def test_a_layer_that_changes_nothing_and_one_that_turns_around() -> None:
    h = torch.randn(5, 8)
    assert hidden_similarity(h, 2 * h) == pytest.approx(1, abs=1e-6)
    assert hidden_similarity(h, -h) == pytest.approx(-1, abs=1e-6)


def test_masked_tokens_do_not_count() -> None:
    torch.manual_seed(1)
    h_in, h_out = torch.randn(6, 8), torch.randn(6, 8)
    mask = torch.tensor([False, True, True, False, True, False])
    expected = hidden_similarity(h_in[mask], h_out[mask])
    h_out[~mask] = torch.nan
    assert hidden_similarity(h_in, h_out, mask) == pytest.approx(expected, abs=1e-7)


def test_nothing_to_measure_and_nan_are_refused() -> None:
    h = torch.randn(3, 4)
    with pytest.raises(UserError, match="No token counts"):
        hidden_similarity(h, h, torch.zeros(3, dtype=torch.bool))
    with pytest.raises(UserError, match="NaN or infinity"):
        hidden_similarity(h, h.index_fill(0, torch.tensor(1), torch.inf))
