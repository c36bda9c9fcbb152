"""Where tokens go."""

import warnings

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.cache.arrange import arrange
from windowquant.cache.recipe import Recipe
from windowquant.models.prompt import Prompt


def random_prompt(rows: int, length: int, random) -> Prompt:
    visual = torch.tensor([[random.random() < 0.7 for _ in range(length)] for _ in range(rows)])
    return Prompt(torch.zeros(rows, length, dtype=torch.int64), torch.ones_like(visual), visual)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 5), st.randoms())
def test_every_column_is_stored_once_in_the_width_of_its_window(rows: int, length: int, size: int, random) -> None:
    prompt = random_prompt(rows, length, random)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = prompt.windows(size).shape[1]
        bits = tuple(random.choice([16, 8, 4, 2]) for _ in range(count))
        got = arrange(prompt, Recipe(size), bits, length)
    assert [place.k_bits for place in got.segments] == sorted({b for b in bits if b < 16}, reverse=True)
    order = got.order()
    for row in range(rows):
        columns = [i for i, on in enumerate(prompt.visual[row].tolist()) if on]
        width_of = {c: bits[i // size] for i, c in enumerate(columns[: len(columns) // size * size])}
        stored = [c for c in order[row].tolist() if c >= 0]
        assert sorted(stored) == list(range(length))
        for place in got.segments:
            assert all(width_of[c] == place.k_bits for c in place.columns[row].flatten().tolist() if c >= 0)
        kept = got.kept[row].tolist()
        filled = [c for c in kept if c >= 0]
        assert kept == [-1] * (len(kept) - len(filled)) + sorted(filled)
        assert all(width_of.get(c, 16) == 16 for c in filled)
    assert got.kept_visual == sum(
        bool(prompt.visual[r, c]) for r in range(rows) for c in got.kept[r].tolist() if c >= 0
    )
    assert got.ragged == bool((order < 0).any())


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.randoms())
def test_dropping_keeps_exactly_the_text(rows: int, length: int, random) -> None:
    prompt = random_prompt(rows, length, random)
    got = arrange(prompt, Recipe(4, drops_visual=True), (), length)
    for row in range(rows):
        text = [i for i, on in enumerate(prompt.visual[row].tolist()) if not on]
        assert [c for c in got.kept[row].tolist() if c >= 0] == text
    assert not got.segments and got.kept_visual == 0


def test_identity_is_only_the_whole_prompt_in_16_bit() -> None:
    visual = torch.tensor([[False, True, True, True, True, False]])
    prompt = Prompt(torch.zeros(1, 6, dtype=torch.int64), torch.ones_like(visual), visual)
    assert arrange(prompt, Recipe(2), (16, 16), 6).identity
    assert not arrange(prompt, Recipe(2), (16, 2), 6).identity
    assert not arrange(prompt, Recipe(2, drops_visual=True), (), 5).identity  # what is left begins with column 0
