"""Where tokens go."""

import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from windowquant.cache.arrange import Arranger
from windowquant.cache.recipe import Recipe
from windowquant.cache.request import CacheRequest
from windowquant.kernels import get_backend
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


def by_hand(prompt: Prompt, recipe: Recipe, bits: tuple[int, ...]) -> tuple[list, list[list[int]], int, int, int]:
    """Segments, stored columns of each row, tokens kept in 16 bit in a row, visual ones among them, empty slots."""
    size, length = recipe.window_size, prompt.length
    visual = [[column for column, on in enumerate(row) if on] for row in prompt.visual.tolist()]
    cut = [[own[i * size : i * size + size] for i in range(len(own) // size)] for own in visual]
    plain = {width for width in bits if width == recipe.v_bits(width) == 16}
    order = list(range(len(bits)))
    if recipe.reorder:
        order = [window for width in (16, 8, 4, 2, 1) for window in order if bits[window] == width]
        order = [window for window in order if bits[window] not in plain]
    elif plain == set(bits):
        order = []
    segments: list[tuple[int, int, list[int]]] = []
    for window in order:
        if not segments or segments[-1][0] != bits[window]:
            segments.append((bits[window], recipe.v_bits(bits[window]), []))
        segments[-1][2].append(window)
    rows, kept = [], []
    for own in cut:
        chosen = [own[window] if window < len(own) else [-1] * size for window in order]
        rows.append([column for window in chosen for column in window])
        kept.append([column for column in range(length) if column not in rows[-1]])
    longest = max(map(len, kept))
    for row, own in zip(rows, kept, strict=True):
        row.extend([-1] * (longest - len(own)) + own)
    seen = sum(column in own for own, columns in zip(visual, kept, strict=True) for column in columns)
    return segments, rows, longest, seen, sum(longest - len(own) for own in kept)


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 40),
    size=st.integers(1, 5),
    widths=st.sampled_from([(16,), (4,), (16, 2), (8, 4, 2), (16, 8, 4, 2, 1)]),
    v_widths=st.sampled_from([(), ((4, 2),), ((16, 4),), ((16, 8), (2, 16))]),
    reorder=st.booleans(),
    random=st.randoms(),
)
def test_as_by_hand(rows: int, length: int, size: int, widths, v_widths, reorder: bool, random) -> None:
    prompt, recipe = random_prompt(rows, length, random), Recipe(size, v_widths=v_widths, reorder=reorder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arranger, count = Arranger(prompt, recipe, length), prompt.windows(size).shape[1]
    for _ in range(3):  # layers of one cache
        bits = tuple(random.choice(widths) for _ in range(count))
        got, (segments, columns, kept, visual, empty) = arranger.arrange(bits), by_hand(prompt, recipe, bits)
        assert [(place.k_bits, place.v_bits, list(place.windows)) for place in got.segments] == segments
        assert got.columns.tolist() == got.order.tolist() == columns
        assert (got.kept, got.kept_visual, got.empty) == (kept, visual, empty)
        assert got.ragged == any(column < 0 for row in columns for column in row)
        assert got.kept_columns().tolist() == [row[len(row) - kept :] for row in columns]
        parts = [torch.empty(rows, 0), *(part.flatten(1) for part in got.segment_columns())]
        assert torch.cat(parts, 1).tolist() == [row[: len(row) - kept] for row in columns]


def request_of(rows: list[tuple[int, ...] | None], length: int) -> CacheRequest:
    visual = torch.ones(1, length, dtype=torch.bool)
    prompt = Prompt(torch.zeros(1, length, dtype=torch.int64), torch.ones_like(visual), visual)
    return CacheRequest(prompt, Recipe(2), rows.__getitem__, get_backend("reference"), lambda: None, len(rows))


@pytest.mark.parametrize("length", [8, 2**16])
def test_layers_of_a_request_are_arranged_as_each_alone(length: int) -> None:
    tail = (4,) * (length // 2 - 2)
    rows: list[tuple[int, ...] | None] = [(16, 2, *tail), (2, 16, *tail), None, (16, 2, *tail)]
    request = request_of(rows, length)
    for layer in (0, 1, 3, 0):
        alone = Arranger(request.prompt, request.recipe, length).arrange(rows[layer] or ())
        got = request.arrangement(layer, length, 1)
        assert [place.windows for place in got.segments] == [place.windows for place in alone.segments]
        assert got.columns.tolist() == alone.columns.tolist()


def test_small_layers_are_arranged_ahead_and_large_ones_are_not() -> None:
    small, large = request_of([(4,) * 4, (2,) * 4], 8), request_of([(4,) * 2**15, (2,) * 2**15], 2**16)
    assert len({id(small.arrangement(layer, 8, 1)) for layer in (0, 1)}) == 2 and len(small._arranged) == 2
    assert small.arrangement(0, 8, 1) is small.arrangement(0, 8, 1)
    large.arrangement(0, 2**16, 1)
    assert len(large._arranged) == 1


def test_another_length_or_number_of_rows_is_arranged_anew() -> None:
    request = request_of([(4,) * 4], 9)
    assert [request.arrangement(0, length, 1).kept for length in (9, 8, 9)] == [1, 0, 1]
    assert [len(request.arrangement(0, 9, times).columns) for times in (1, 3, 1)] == [1, 3, 1]
