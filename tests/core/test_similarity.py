"""Window scores against a plain double loop over text and window tokens in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from windowquant.core import similarity
from windowquant.core.similarity import Metric, window_scores
from windowquant.errors import UserError

METRICS: list[Metric] = ["cosine", "pearson", "euclidean"]


def _pair(metric: str, t: list[float], w: list[float]) -> float:
    if metric == "euclidean":
        return sum((a - b) ** 2 for a, b in zip(t, w, strict=True))
    if metric == "pearson":
        t, w = ([value - sum(x) / len(x) for value in x] for x in (t, w))
    dot = sum(a * b for a, b in zip(t, w, strict=True))
    return dot / (math.hypot(*t) * math.hypot(*w))


def _double_loop(visual: Tensor, text: Tensor, size: int, metric: str) -> list[float]:
    scores = []
    for i in range(len(visual) // size):
        window = visual[i * size : (i + 1) * size].double().tolist()
        pairs = [_pair(metric, t, w) for t in text.double().tolist() for w in window]
        mean = sum(pairs) / len(pairs)
        scores.append(1 / (1 + math.sqrt(mean)) if metric == "euclidean" else mean)
    return scores


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shape=st.tuples(st.integers(5, 40), st.integers(1, 7), st.integers(2, 24), st.integers(1, 5)),
    metric=st.sampled_from(METRICS),
    shift=st.floats(-3, 3),
)
def test_factorised_form_equals_the_double_loop(
    seed: int, shape: tuple[int, int, int, int], metric: Metric, shift: float
) -> None:
    m, n, channels, size = shape
    generator = torch.Generator().manual_seed(seed)
    visual, text = (torch.randn(rows, channels, generator=generator) + shift for rows in (m, n))
    got = window_scores(visual, text, size, metric, "none")
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), torch.tensor(_double_loop(visual, text, size, metric), dtype=torch.float64), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_embeddings_are_scored_in_float32(metric: Metric, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    visual, text = torch.randn(64, 96).to(dtype), torch.randn(9, 96).to(dtype)
    expected = torch.tensor(_double_loop(visual, text, 16, metric))
    torch.testing.assert_close(window_scores(visual, text, 16, metric, "none"), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("chunk", [1, 7 * 12, 10**6])
def test_score_does_not_depend_on_the_chunk(metric: Metric, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    visual, text = torch.randn(50, 12), torch.randn(3, 12)
    expected = window_scores(visual, text, 8, metric)
    monkeypatch.setitem(similarity._CHUNK, "cpu", chunk)
    torch.testing.assert_close(window_scores(visual, text, 8, metric), expected, atol=1e-5, rtol=1e-5)


def test_cosine_and_pearson_ignore_length_and_euclidean_does_not() -> None:
    torch.manual_seed(2)
    visual, text = torch.randn(32, 8), torch.randn(4, 8)
    for metric in METRICS:
        same = torch.allclose(
            window_scores(visual, text, 8, metric, "none"),
            window_scores(3 * visual, text, 8, metric, "none"),
            atol=1e-6,
        )
        assert same == (metric != "euclidean")


def test_equal_tokens_score_one() -> None:
    x = torch.randn(1, 16)
    for metric in METRICS:
        assert float(window_scores(x.expand(4, -1), x, 2, metric, "none")[0]) == pytest.approx(1, abs=1e-3)


def test_zero_embeddings_score_zero_instead_of_nan() -> None:
    assert window_scores(torch.zeros(4, 8), torch.randn(2, 8), 2, "cosine", "none").tolist() == [0, 0]


def test_minmax_stretches_to_the_unit_interval_and_keeps_the_order() -> None:
    torch.manual_seed(3)
    visual, text = torch.randn(96, 16), torch.randn(5, 16)
    raw, scaled = (window_scores(visual, text, 8, "cosine", scaling) for scaling in ("none", "minmax"))
    assert (float(scaled.min()), float(scaled.max())) == (0, 1)
    assert torch.equal(raw.argsort(), scaled.argsort())


def test_rank_averages_ties() -> None:
    one, other = torch.eye(4)[:2]
    visual = torch.stack([other, one, other, -one, one])
    assert window_scores(visual, one[None], 1, "cosine", "rank").tolist() == [0.375, 0.875, 0.375, 0, 0.875]


@pytest.mark.parametrize("scaling", ["minmax", "rank"])
@pytest.mark.parametrize("windows", [1, 3])
def test_windows_that_do_not_differ_score_one_half(scaling: similarity.Scaling, windows: int) -> None:
    visual = torch.eye(16)[:1].expand(4 * windows, -1)
    scores = window_scores(visual, torch.randn(2, 16), 4, "cosine", scaling)
    assert scores.tolist() == [0.5] * windows


def test_no_whole_window_gives_no_score() -> None:
    with pytest.warns(UserWarning, match="larger than the visual span"):
        scores = window_scores(torch.randn(3, 8), torch.randn(2, 8), 4)
    assert scores.shape == (0,) and scores.dtype == torch.float32


def test_tail_tokens_have_no_say() -> None:
    torch.manual_seed(4)
    visual, text = torch.randn(20, 8), torch.randn(2, 8)
    expected = window_scores(visual, text, 8)
    visual[16:] = torch.nan
    assert torch.equal(window_scores(visual, text, 8), expected)


@pytest.mark.parametrize("metric", METRICS)
def test_embeddings_are_left_as_they_are(metric: Metric) -> None:
    visual, text = torch.randn(16, 8), torch.randn(3, 8, requires_grad=True)
    before = (visual.clone(), text.detach().clone())
    assert not window_scores(visual, text, 4, metric).requires_grad
    assert torch.equal(visual, before[0]) and torch.equal(text, before[1])


def test_bad_input_is_named() -> None:
    visual, text = torch.randn(8, 4), torch.randn(2, 4)
    with pytest.raises(UserError, match="no text token"):
        window_scores(visual, text[:0], 4)
    with pytest.raises(UserError, match="metric is 'manhattan'; use one of cosine, pearson, euclidean"):
        window_scores(visual, text, 4, "manhattan")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="scaling is 'softmax'; use one of minmax, none, rank"):
        window_scores(visual, text, 4, "cosine", "softmax")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="4 channels and text embeddings 5"):
        window_scores(visual, torch.randn(2, 5), 4)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(UserError, match="NaN or infinity"):
            window_scores(visual.index_fill(0, torch.tensor(3), bad), text, 4)
