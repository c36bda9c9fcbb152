"""Divergence against a plain double loop in float64, and the file of FP16's answers."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.errors import UserError
from windowquant.harness.fidelity import Reference, divergence, save_reference


def looped(reference: torch.Tensor, logits: torch.Tensor) -> tuple[float, float]:
    total, agree = 0.0, 0
    for row, other in zip(reference.tolist(), logits.tolist(), strict=True):
        norm = math.log(sum(math.exp(x) for x in other))
        total += sum(math.exp(p) * (p - (x - norm)) for p, x in zip(row, other, strict=True) if p > -math.inf)
        agree += row.index(max(row)) == other.index(max(other))
    return total / len(reference), agree / len(reference)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(2, 40), st.integers(0, 1000))
def test_divergence_equals_the_double_loop(n: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(n, vocabulary, generator=generator).mul(3).log_softmax(-1)
    logits = torch.randn(n, vocabulary, generator=generator).mul(3)
    kl, agreement = looped(reference, logits)
    found = divergence(reference, logits)
    assert found[0] == pytest.approx(kl, rel=1e-4, abs=1e-6)
    assert found[1] == pytest.approx(agreement)


def test_same_distribution_diverges_by_nothing() -> None:
    logits = torch.randn(4, 9)
    kl, agreement = divergence(logits.log_softmax(-1), logits + 5)  # a shift changes no distribution
    assert kl == pytest.approx(0, abs=1e-6)
    assert agreement == 1


def test_impossible_tokens_count_nothing() -> None:
    reference = torch.tensor([[0.0, -math.inf]])
    assert divergence(reference, torch.tensor([[1.0, -math.inf]])) == (0.0, 1.0)


def test_answers_come_back_as_they_were(tmp_path: Path) -> None:
    log_probs = torch.randn(3, 7).log_softmax(-1)
    path = tmp_path / "deep" / "reference.safetensors"
    save_reference({4: ([1, 2, 0], log_probs), 11: ([5], log_probs[:1].clone())}, path)
    reference = Reference(path)
    tokens, found = reference.answer(4) or ([], None)
    assert tokens == [1, 2, 0]
    assert torch.equal(found, log_probs)
    assert reference.answer(11)[0] == [5]
    assert reference.answer(5) is None
    assert [p.name for p in path.parent.iterdir()] == ["reference.safetensors"]


def test_a_missing_reference_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="reference.safetensors is missing"):
        Reference(tmp_path / "reference.safetensors")
