"""Strict reading of answers, and intervals against their definitions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windowquant.harness.scoring import bootstrap, parse_letter, target_letter, wilson


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        (" B ", "B"),
        ("B.", "B"),
        ("B:", "B"),
        ("(B)", "B"),
        ("(B).", "B"),
        ("to play (C)", "C"),
        ("the (C) and again (C)", "C"),
        ("D. to sing", "D"),
        ("D) to sing", "D"),
        ("", None),
        ("b", None),
        ("to play", None),
        ("a", None),
        ("A or B", None),
        ("(A) or (B)", None),
        ("Answer:C", None),
        ("**B**", None),
        ("F", None),
        ("(F) to fly", None),
        ("to fly (F), no, to run (D)", "D"),
        ("Because the CAMERA moves", None),
        ("AB", None),
    ],
)
def test_letters_are_read_and_never_guessed(text: str, letter: str | None) -> None:
    assert parse_letter(text) == letter


@given(st.text(alphabet="abc xyz,.:", max_size=30), st.sampled_from("ABCDE"))
def test_an_answer_with_its_letter_in_brackets_is_read(words: str, letter: str) -> None:
    assert parse_letter(f"{words} ({letter})") == letter


@given(st.text(max_size=40))
def test_whatever_is_read_stands_in_the_text(text: str) -> None:
    letter = parse_letter(text)
    assert letter is None or letter in text


def test_letters_beyond_the_options_are_none() -> None:
    assert parse_letter("D", options=3) is None
    assert parse_letter("(C)", options=3) == "C"


@pytest.mark.parametrize(("target", "letter"), [(0, "A"), ("3", "D"), ("E", "E"), (4, "E")])
def test_targets_of_every_benchmark_become_letters(target: object, letter: str) -> None:
    assert target_letter(target) == letter


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (5, 5), (1, 7), (60, 100), (499, 500)])
def test_wilson_bounds_are_where_the_score_test_just_rejects(hits: int, n: int) -> None:
    """Oracle: scan p for the hypotheses that |p_hat - p| <= 1.96 sqrt(p (1 - p) / n) does not reject."""
    p = np.linspace(0, 1, 200_001)
    kept = p[np.abs(hits / n - p) <= 1.959964 * np.sqrt(p * (1 - p) / n) + 1e-12]
    low, high = wilson(hits, n)
    assert low == pytest.approx(100 * kept.min(), abs=2e-3)
    assert high == pytest.approx(100 * kept.max(), abs=2e-3)


def test_intervals_of_nothing_say_nothing() -> None:
    assert wilson(0, 0) == bootstrap([]) == (0.0, 100.0)


def test_bootstrap_is_seeded_and_agrees_with_the_normal_approximation() -> None:
    values = np.random.default_rng(1).beta(5, 2, 300).tolist()
    low, high = bootstrap(values, seed=3)
    assert (low, high) == bootstrap(values, seed=3) != bootstrap(values, seed=4)
    half = 196 * np.std(values, ddof=1) / math.sqrt(len(values))
    assert low == pytest.approx(100 * np.mean(values) - half, abs=0.4)
    assert high == pytest.approx(100 * np.mean(values) + half, abs=0.4)
