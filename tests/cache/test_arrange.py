"""Where tokens go."""

import warnings
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.cache.arrange import Arranger
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
        got = Arranger(prompt, Recipe(size), length).arrange(bits)
    assert [place.k_bits for place in got.segments] == sorted({b for b in bits if b < 16}, reverse=True)
    order = got.order
    for row in range(rows):
        columns = [i for i, on in enumerate(prompt.visual[row].tolist()) if on]
        width_of = {c: bits[i // size] for i, c in enumerate(columns[: len(columns) // size * size])}
        stored = [c for c in order[row].tolist() if c >= 0]
        assert sorted(stored) == list(range(length))
        for place, inside in zip(got.segments, got.segment_columns(), strict=True):
            assert all(width_of[c] == place.k_bits for c in inside[row].flatten().tolist() if c >= 0)
        kept = got.kept_columns()[row].tolist()
        filled = [c for c in kept if c >= 0]
        assert kept == [-1] * (len(kept) - len(filled)) + sorted(filled)
        assert all(width_of.get(c, 16) == 16 for c in filled)
    assert got.kept_visual == sum(
        bool(prompt.visual[r, c]) for r in range(rows) for c in got.kept_columns()[r].tolist() if c >= 0
    )
    assert got.ragged == bool((order < 0).any())


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.randoms())
def test_dropping_the_text_between_keeps_what_is_before_and_after(rows: int, length: int, random) -> None:
    prompt = random_prompt(rows, length, random)
    got = Arranger(prompt, Recipe(4, drops_visual=True, drops_between=True), length).arrange(())
    for row in range(rows):
        visual = [i for i, on in enumerate(prompt.visual[row].tolist()) if on]
        outside = [i for i in range(length) if not visual or i < visual[0] or i > visual[-1]]
        assert [c for c in got.kept_columns()[row].tolist() if c >= 0] == outside


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.randoms())
def test_dropping_keeps_exactly_the_text(rows: int, length: int, random) -> None:
    prompt = random_prompt(rows, length, random)
    got = Arranger(prompt, Recipe(4, drops_visual=True), length).arrange(())
    for row in range(rows):
        text = [i for i, on in enumerate(prompt.visual[row].tolist()) if not on]
        assert [c for c in got.kept_columns()[row].tolist() if c >= 0] == text
    assert not got.segments and got.kept_visual == 0


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 4), st.randoms())
def test_in_place_windows_keep_their_order_in_runs(rows: int, length: int, size: int, random) -> None:
    prompt = random_prompt(rows, length, random)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count = prompt.windows(size).shape[1]
        bits = tuple(random.choice([16, 4, 2]) for _ in range(count))
        got = Arranger(prompt, Recipe(size, reorder=False, v_widths=((4, 2),)), length).arrange(bits)
    if set(bits) <= {16}:  # nothing is quantized: all columns are where they were anyway
        assert not got.segments and got.kept == length
        return
    assert [w for place in got.segments for w in place.windows] == list(range(count))
    assert [place.k_bits for place in got.segments for _ in place.windows] == list(bits)
    assert all(a.k_bits != b.k_bits for a, b in pairwise(got.segments))
    assert all(place.v_bits == (2 if place.k_bits == 4 else place.k_bits) for place in got.segments)
    for row, order in enumerate(got.order.tolist()):
        columns = [i for i, on in enumerate(prompt.visual[row].tolist()) if on]
        whole = columns[: len(columns) // size * size]
        assert [c for c in order if c >= 0 and c in whole] == whole
        assert sorted(c for c in order if c >= 0) == list(range(length))
        assert not set(got.kept_columns()[row].tolist()) & set(whole)


def test_windows_whose_k_or_v_alone_stays_in_16_bit_are_segments() -> None:
    prompt = Prompt(*(torch.ones(1, 6, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.bool)))
    got = Arranger(prompt, Recipe(2, v_widths=((16, 4), (2, 16))), 6).arrange((16, 2, 16))
    assert [(p.k_bits, p.v_bits, p.windows) for p in got.segments] == [(16, 4, (0, 2)), (2, 16, (1,))]
    assert got.kept == 0 and got.order.shape == (1, 6) and got.kept_visual == 0
    only_v = Arranger(prompt, Recipe(2, v_widths=((16, 4),)), 6).arrange((16, 16, 16))
    assert [(p.k_bits, p.v_bits, p.windows) for p in only_v.segments] == [(16, 4, (0, 1, 2))]
