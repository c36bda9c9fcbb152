"""Importance of tokens against plain loops."""

import pytest
import torch

from windowquant.core import importance
from windowquant.core.importance import balance, ranked, received_attention, tiers


@pytest.mark.parametrize("masked", [None, "bool", "additive"])
@pytest.mark.parametrize("chunk", [2**24, 1])
def test_received_attention(masked: str | None, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "_CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 6, 3, 8, generator=generator), torch.randn(2, 2, 7, 8, generator=generator)
    visible = torch.ones(2, 1, 3, 7, dtype=torch.bool).tril(4)
    if masked:
        visible[1, :, :, :2] = False
    counted = torch.tensor([[True, True, True], [False, True, True]])
    want = torch.zeros(2, 2, 7, dtype=torch.float64)
    for b in range(2):
        for h in range(6):
            for i in range(3):
                if counted[b, i]:
                    scores = 0.5 * (k[b, h // 3].double() @ q[b, h, i].double())
                    scores[~visible[b, 0, i]] = -torch.inf
                    want[b, h // 3] += scores.softmax(0)
    mask = None if masked is None else visible
    if masked == "additive":
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    torch.testing.assert_close(received_attention(q, k, mask, 0.5, counted), want.float(), atol=1e-5, rtol=1e-5)


def test_tiers_go_by_rank() -> None:
    assert tiers(5, (0.2, 0.4), (16, 4, 2)).tolist() == [16, 4, 4, 2, 2]
    assert tiers(5, (0.0, 0.0), (16, 4, 2)).tolist() == [2] * 5
    assert tiers(5, (1.0, 0.0), (16, 4, 2)).tolist() == [16] * 5
    assert tiers(5, (0.5, 0.5), (16, 4, 2)).tolist() == [16, 16, 4, 4, 4], "no token is left over"
    assert tiers(0, (0.5, 0.5), (16, 4, 2)).tolist() == []


def test_ranks_go_by_score_and_the_newest_come_first() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.9, -1.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    assert ranked(scores).tolist() == [[1, 3, 2, 0, 4], [0, 1, 2, 3, 4]]
    assert ranked(scores, 0.4).tolist() == [[3, 4, 1, 2, 0], [3, 4, 0, 1, 2]]
    assert ranked(scores, 1.0).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert ranked(scores, 0.05).tolist() == ranked(scores).tolist(), "less than half a token is none"
    assert scores[0].tolist() == pytest.approx([0.1, 0.9, 0.5, 0.9, -1.0]), "left as they are"


def test_balance_in_mikvs_numbers() -> None:
    found = balance(torch.tensor([4.0, 1, 9, 0.5]), torch.tensor([1.0, 4, 1, 0.5]))
    assert found.tolist() == [2, 0.5, 3, 1]
    scaled = torch.tensor([1, -4, 0.3, 0.5]) * found
    assert scaled.tolist() == pytest.approx([2, -2, 0.9, 0.5])
    assert balance(torch.tensor([0.0, 3.0, 0.0]), torch.tensor([2.0, 0.0, 0.0])).tolist() == [1, 1, 1]
