"""The search for clips by the output of attention, against plain loops and the whole grid."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from windowquant.calibrate import clips
from windowquant.calibrate.clips import CLIPS, DrawnAttention, search_clips


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """RoPE on [n, H, 8], pair by pair, float64."""
    out = x.double().clone()
    for token, position in enumerate(positions.tolist()):
        for j in range(4):
            angle = position * 100 ** (-j / 4)
            a, b = x[token, :, j].double(), x[token, :, j + 4].double()
            out[token, :, j] = a * math.cos(angle) - b * math.sin(angle)
            out[token, :, j + 4] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.fixture
def drawn() -> DrawnAttention:
    """Five tokens of one prompt and four of another; three query heads a KV head."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, generator=generator) for heads in (6, 2, 2))
    positions = torch.tensor([0, 7, 9, 20, 33, 0, 2, 5, 40])
    return DrawnAttention(q, turned(k, positions).float(), k, v, torch.tensor([0] * 5 + [1] * 4))


def test_output_is_causal_attention_within_a_prompt(drawn: DrawnAttention) -> None:
    got = drawn.output(drawn.key, drawn.value)
    for token, head in product(range(9), range(6)):
        seen = [other for other in range(token + 1) if drawn.sample[other] == drawn.sample[token]]
        k, v = (x[seen, head // 3].double() for x in (drawn.key, drawn.value))
        weights = (k @ drawn.query[token, head].double() / math.sqrt(8)).softmax(0)
        torch.testing.assert_close(got[token, head].double(), weights @ v, atol=1e-6, rtol=1e-5)


def test_errors_are_of_the_output(drawn: DrawnAttention) -> None:
    exact = drawn.output(drawn.key, drawn.value)
    assert drawn.key_error(drawn.key) == drawn.value_error(drawn.value) == 0
    other = drawn.value.round()
    assert drawn.value_error(other) == pytest.approx(float((drawn.output(drawn.key, other) - exact).square().mean()))
    assert drawn.key_error(drawn.key.round()) > 0


def test_rope_is_read_off_the_drawn_keys(drawn: DrawnAttention) -> None:
    x = torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 7, 9, 20, 33, 0, 2, 5, 40])
    torch.testing.assert_close(drawn.rotated(x).double(), turned(x, positions), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(drawn.rotated(drawn.unrotated_key), drawn.key, atol=1e-5, rtol=1e-5)


def test_one_cluster_gets_the_best_of_the_grid() -> None:
    found = search_clips(1, lambda tried: abs(float(tried[0]) - 0.713))
    assert float(found[0]) == pytest.approx(min(CLIPS, key=lambda clip: abs(clip - 0.713)))


@pytest.mark.parametrize("seed", range(8))
def test_several_are_no_worse_than_any_shared_clip(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "CLIPS", (1.0, 0.9, 0.8, 0.7))
    table = torch.rand(4, 4, 4, generator=torch.Generator().manual_seed(seed))

    def error(tried: Tensor) -> float:
        return float(table[tuple(round(10 * (1 - float(clip))) for clip in tried)])

    found = error(search_clips(3, error))
    assert found <= min(float(table[i, i, i]) for i in range(4))
    assert found >= float(table.min())


def test_independent_clusters_each_get_their_best() -> None:
    wanted = torch.tensor([0.98, 0.64, 0.5])
    found = search_clips(3, lambda tried: float((tried - wanted).square().sum()))
    torch.testing.assert_close(found, wanted)
