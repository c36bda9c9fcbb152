"""An explanation's numbers against ones worked out plainly here."""

import json
import math

import numpy as np
import pytest
import torch

from tests.architectures import ARCHITECTURES, build
from tests.architectures import video_inputs as architecture_inputs
from tests.vlm import FIRST_WORD, NEWLINE, PER_FRAME, VIDEO, tiny_model, video_inputs, words
from windowquant.errors import UserError
from windowquant.explain import Explanation, explain
from windowquant.explain.picture import held_kinds
from windowquant.method import get_method

SENSITIVITY = (0.45, 0.6)
S = 8

PICTURES = {"llava_next": 1, "qwen2_vl": 4, "qwen2_5_vl": 4, "qwen3_vl": 4}
"""Of 8 frames, where not each is one to the adapter."""


def explained(
    name: str = "windowquant", frames: int = 8, new: int = 5, pictures: bool = False, **params
) -> Explanation:
    shown = [np.full((16, 16, 3), 5 * i, np.uint8) for i in range(frames)] if pictures else None
    if name == "windowquant":
        params = {"sensitivity": SENSITIVITY, **params}
    windows = {} if name in ("dynamic", "kivi") else {"window_size": S}
    with get_method(name, **{**windows, **params}).bind(tiny_model()) as bound:
        return explain(bound, video_inputs(frames), shown, max_new_tokens=new)


def embeddings(frames: int = 8) -> tuple[list, list]:
    """Visual and text tokens of the prompt as they enter the language model: float64 vectors."""
    model, inputs, seen = tiny_model(), video_inputs(frames), []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["inputs_embeds"][0].double()), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    ids = inputs["input_ids"][0].tolist()
    visual = [vector for vector, token in zip(seen[0], ids, strict=True) if token == VIDEO]
    text = [vector for vector, token in zip(seen[0], ids, strict=True) if token >= FIRST_WORD]
    return visual, text


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(a @ b / (a.norm() * b.norm()))


def test_scores_thresholds_and_plan_are_those_of_the_equations() -> None:
    found, (visual, text) = explained(alpha=1.5), embeddings()
    raw = [
        sum(cosine(t, w) for t in text for w in visual[i * S : (i + 1) * S]) / (len(text) * S)
        for i in range(len(visual) // S)
    ]
    scores = [(r - min(raw)) / (max(raw) - min(raw)) for r in raw]
    assert found.scores == pytest.approx(scores, abs=1e-5)
    low = [(math.exp(1.5 * s) - 1) / (math.exp(1.5) - 1) for s in SENSITIVITY]
    high = [(math.exp(-1.5 * s) - 1) / (math.exp(-1.5) - 1) for s in SENSITIVITY]
    assert found.sensitivity == pytest.approx(SENSITIVITY)
    assert [pair[0] for pair in found.thresholds] == pytest.approx(low)
    assert [pair[1] for pair in found.thresholds] == pytest.approx(high)
    limits = zip(low, high, strict=True)
    plan = [[16 if x > b or i == 0 else 2 if x < a else 4 for i, x in enumerate(scores)] for a, b in limits]
    assert found.plan is not None
    assert [list(row) for row in found.plan.bits] == plan
    assert found.widths == (16, 4, 2)


def test_bytes_are_those_of_all_tokens_in_16_bits_against_those_held() -> None:
    found, prompt = explained(new=5), video_inputs()["input_ids"].shape[1]
    layers, kv_heads, head_dim = 2, 2, 8
    assert found.fp16_bytes == (prompt + 5 - 1) * 2 * 2 * layers * kv_heads * head_dim
    assert found.saved_bytes == found.fp16_bytes - found.kv.total > 0
    assert sum(found.bits.values()) == pytest.approx(1)
    shares = [1 if width == bits else 0 for row in found.plan.bits for width in row for bits in (2,)]
    assert found.bits[2] == pytest.approx(sum(shares) * S / (layers * found.visual_tokens))


def test_windows_are_told_by_the_frames_that_they_cover() -> None:
    found = explained(frames=8)
    assert found.picture_tokens == (PER_FRAME,) * 7 + (PER_FRAME + NEWLINE,)
    assert found.spans == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert explained(window_size=6).spans == ((0, 1), (1, 2), (3, 4), (4, 5), (6, 7))
    with pytest.warns(UserWarning, match="window_size 64 is larger"):
        assert explained(window_size=64).spans == ()


def test_question_and_answer_are_those_of_the_prompt_and_of_generate() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("fp16", kv_dtype="model").bind(model) as bound:
        found = explain(bound, inputs, max_new_tokens=6)
        named = explain(bound, inputs, question="what?", max_new_tokens=1)
    own = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert found.answer == " ".join(map(str, own.tolist()))
    assert found.question == " ".join(map(str, words(7, 1)))
    assert (named.question, named.model, named.stand_in) == ("what?", "llava_onevision", False)


@pytest.mark.parametrize("name", ["fp16", "uniform_int2", "no_video", "dynamic", "kivi"])
def test_a_method_that_looks_at_nothing_has_no_scores(name: str) -> None:
    found = explained(name, **({"group": 8, "residual": 8} if name == "kivi" else {}))
    assert (found.scores, found.sensitivity, found.thresholds) == (None, None, None)
    assert (found.plan is None) == (name in ("dynamic", "kivi"))
    assert found.drops_visual == (name == "no_video")
    kinds = {kind for kind, _, _ in held_kinds(found)}
    assert ("not packed" in kinds) == (name == "dynamic")
    assert ("packed codes" in kinds) == (name in ("uniform_int2", "kivi"))


def test_the_thresholds_are_those_of_the_alpha_that_met_the_budget() -> None:
    found = explained(target_bits=11.0)
    assert found.plan is not None and found.plan.alpha is not None
    alpha = found.plan.alpha
    assert found.thresholds[0][0] == pytest.approx(math.expm1(alpha * 0.45) / math.expm1(alpha))


def test_the_dictionary_is_json_and_holds_the_numbers() -> None:
    found = explained(pictures=True)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["scores"] == list(found.scores)
    assert values["plan"] == [list(row) for row in found.plan.bits]
    assert values["spans"][1] == [2, 3]
    assert values["kv"]["total"] == found.kv.total
    assert values["alpha"] == 2.0
    assert "frames" not in values
    assert json.loads(json.dumps(explained("dynamic").to_dict()))["plan"] is None


def test_frames_are_kept_small() -> None:
    with get_method("fp16").bind(tiny_model()) as bound:
        found = explain(bound, video_inputs(2), [np.zeros((600, 900, 3), np.uint8)] * 2, max_new_tokens=1)
    assert [frame.shape for frame in found.frames] == [(128, 192, 3)] * 2


def test_a_prompt_without_a_video_is_refused() -> None:
    with (
        get_method("fp16").bind(tiny_model()) as bound,
        pytest.raises(UserError, match="no visual tokens, so there is nothing to explain"),
    ):
        explain(bound, {"input_ids": torch.tensor([words(5)])})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_explained(name: str) -> None:
    model, processor = build(name)
    inputs = architecture_inputs(name, processor)
    with get_method("windowquant", window_size=4, sensitivity=SENSITIVITY).bind(model, processor) as bound:
        found = explain(bound, inputs, max_new_tokens=2)
    visual = sum(int((inputs["input_ids"] == token).sum()) for token in bound.adapter.placeholders(model).values())
    assert found.visual_tokens == visual
    assert len(found.picture_tokens) == PICTURES.get(name, 8)
    assert len(found.scores) == found.plan.windows == len(found.spans) == visual // 4
    assert found.spans[-1][1] <= len(found.picture_tokens) - 1
    assert found.question == "what is this?"
