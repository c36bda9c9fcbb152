"""Vision features on their own."""

import torch

from tests.vlm import tiny_model, video_inputs
from windowquant.method import get_method
from windowquant.protocols import answer


def test_features_equal_the_vision_modules_output_and_the_model_is_left_alone() -> None:
    model, inputs = tiny_model(), video_inputs(frames=3)
    before = model(**inputs).logits
    with get_method("fp16").bind(model) as bound:
        features = bound.visual_features(inputs).tokens
    frames = model.model.vision_tower(inputs["pixel_values_videos"][0], output_hidden_states=True).hidden_states[-1]
    pooled = model.model.apply_pooling(model.model.multi_modal_projector(frames)).flatten(0, 1)
    torch.testing.assert_close(features, torch.cat([pooled, model.model.image_newline[None]]))
    assert torch.equal(model(**inputs).logits, before)


def test_answers_from_given_features_are_the_same() -> None:
    model, inputs = tiny_model(), video_inputs(frames=8)
    with get_method("uniform_int2", window_size=8).bind(model) as bound:
        spared = {k: v for k, v in inputs.items() if k != "pixel_values_videos"}
        spared["visual_features"] = bound.visual_features(inputs)
        for protocol in ("context", "paper", "cached"):
            reply, session = answer(bound, inputs, protocol, 5)
            again, second = answer(bound, spared, protocol, 5)
            assert again.tokens == reply.tokens
            assert torch.equal(second.logits(reply.tokens), session.logits(reply.tokens))
