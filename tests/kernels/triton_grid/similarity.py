"""Window scores in one launch, against the plain search."""

import pytest
import torch

from windowquant.core import similarity
from windowquant.core.similarity import Metric
from windowquant.errors import UserError
from windowquant.kernels.triton_similarity import window_scores


@pytest.mark.parametrize("metric", ["cosine", "pearson", "euclidean"])
@pytest.mark.parametrize("channels", [48, 300])
@pytest.mark.parametrize("size", [1, 16, 37])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores(metric: Metric, channels: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    visual = (torch.randn(size * 5 + size // 2, channels, generator=generator) + 0.5).to(dtype)
    text = torch.randn(7, channels, generator=generator).to(dtype)
    got = window_scores(visual.to(device), text.to(device), size, metric, "none").cpu()
    expected = similarity.window_scores(visual.double(), text.double(), size, metric, "none")
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-4)


def test_a_strided_view_and_scaling(device: torch.device) -> None:
    visual = torch.randn(64, 40, generator=torch.Generator().manual_seed(0)).to(device)
    text = visual[:3, 8:].clone()
    got = window_scores(visual[:, 8:], text, 8)
    torch.testing.assert_close(got.cpu(), similarity.window_scores(visual[:, 8:].cpu(), text.cpu(), 8))
    assert got.min() == 0 and got.max() == 1


@pytest.mark.parametrize("metric", ["cosine", "pearson", "euclidean"])
def test_embeddings_that_are_not_finite(metric: Metric, device: torch.device) -> None:
    visual = torch.randn(32, 16)
    visual[20, 3] = torch.nan
    with pytest.raises(UserError, match="NaN or infinity"):
        window_scores(visual.to(device), torch.randn(2, 16).to(device), 8, metric)
