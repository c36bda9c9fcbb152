"""Sorting a prompt's tokens, and cutting windows."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlm import IMAGE, VIDEO, batch_inputs, tiny_model, video_ids, words
from windowquant.errors import UserError
from windowquant.models import adapter_for, cache_keyword, text_positions, visual_positions
from windowquant.models.prompt import Prompt


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def plain_positions(ids: list[int], mask: list[int], visual: bool) -> list[int]:
    return [
        i for i, (token, on) in enumerate(zip(ids, mask, strict=True)) if on and (token in (IMAGE, VIDEO)) == visual
    ]


def test_positions_of_a_left_padded_batch_equal_a_plain_loop(model) -> None:
    rows = [video_ids(4, before=2, after=9), [5, IMAGE, IMAGE, 9, IMAGE, 7], words(4)]
    inputs = batch_inputs(rows, frames=4)
    for got, visual in ((visual_positions(model, inputs), True), (text_positions(model, inputs), False)):
        ids, masks = inputs["input_ids"].tolist(), inputs["attention_mask"].tolist()
        assert [x.tolist() for x in got] == [plain_positions(i, m, visual) for i, m in zip(ids, masks, strict=True)]


def test_without_attention_mask_nothing_is_padding(model) -> None:
    assert text_positions(model, {"input_ids": torch.tensor([[0, 5, IMAGE]])})[0].tolist() == [0, 1]


def test_unknown_architecture_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(UserError, match="visual tokens of a 'Linear' model cannot be located.*llava_onevision"):
        adapter_for(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_config_without_placeholders_is_refused(model) -> None:
    kept = model.config.image_token_id, model.config.video_token_id
    model.config.image_token_id = model.config.video_token_id = None
    try:
        with pytest.raises(UserError, match="image_token_id"):
            visual_positions(model, {"input_ids": torch.tensor([[5]])})
    finally:
        model.config.image_token_id, model.config.video_token_id = kept


@pytest.mark.parametrize("inputs", [{}, {"input_ids": torch.tensor([1, 2])}, {"input_ids": torch.zeros(1, 0)}])
def test_missing_ids_are_refused(model, inputs) -> None:
    with pytest.raises(UserError, match="input_ids"):
        visual_positions(model, inputs)


def test_mask_of_another_shape_is_refused(model) -> None:
    inputs = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 3)}
    with pytest.raises(UserError, match="attention_mask"):
        visual_positions(model, inputs)


def test_cache_keyword_is_one_the_model_takes(model) -> None:
    import inspect

    assert cache_keyword(model) in inspect.signature(model.forward).parameters


def prompt_of(visual: list[list[bool]]) -> Prompt:
    mask = torch.tensor(visual)
    return Prompt(torch.zeros(mask.shape, dtype=torch.int64), torch.ones_like(mask), mask)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(1, 9), st.randoms())
def test_windows_equal_a_plain_loop(rows: int, length: int, size: int, random) -> None:
    visual = [[random.random() < 0.7 for _ in range(length)] for _ in range(rows)]
    prompt = prompt_of(visual)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = prompt.windows(size).tolist()
    for row, windows in zip(visual, got, strict=True):
        columns = [i for i, on in enumerate(row) if on]
        want = [columns[i : i + size] for i in range(0, len(columns) - size + 1, size)]
        assert windows[: len(want)] == want
        assert all(column == -1 for window in windows[len(want) :] for column in window)
    assert len(got[0]) == max(sum(row) // size for row in visual)
    assert prompt.visual_end == max((i + 1 for row in visual for i, on in enumerate(row) if on), default=0)


def test_a_window_larger_than_the_span_warns_and_cuts_nothing() -> None:
    with pytest.warns(UserWarning, match="window_size 8 is larger"):
        assert prompt_of([[True, True, False]]).windows(8).shape == (1, 0, 8)
