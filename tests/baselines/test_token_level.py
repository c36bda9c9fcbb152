"""Mixed precision per token."""

import pytest
import torch

from tests.cache.test_nbytes import storage_bytes
from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.core.quantizer import dequantize, quantize
from windowquant.core.similarity import window_scores
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import answer

SOURCES = ["attention", "similarity"]


@pytest.mark.parametrize(
    ("k", "codes", "scale", "want"),
    [
        ([2, -2, 0.9, 0.5], [3, 0, 2, 2], 4 / 3, [2, -2, 2 / 3, 2 / 3]),  # MiKV's example, channels balanced
        ([1, -4, 0.3, 0.5], [3, 0, 3, 3], 5 / 3, [1, -4, 1, 1]),  # and as they are
    ],
)
def test_numbers_of_the_low_tier(k: list[float], codes: list[int], scale: float, want: list[float]) -> None:
    block = quantize(torch.tensor(k).view(1, 1, 1, 1, 4), 2, "token", "float")
    got = dequantize(block).flatten()
    assert float(block.scale) == pytest.approx(scale) and got.tolist() == pytest.approx(want, abs=1e-5)
    assert torch.round((got - min(k)) / scale).tolist() == codes


@pytest.mark.parametrize("source", SOURCES)
def test_shares_of_every_layer_and_bytes(source: str) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("token_level", importance=source).bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 12)
        assert reply.bits == pytest.approx({16: 7 / 33, 4: 9 / 33, 2: 17 / 33})
        for row in reply.plan.bits:
            assert [row.count(width) for width in (16, 4, 2)] == [7, 9, 17]
        assert session.logits(reply.tokens).argmax(-1).tolist() == reply.tokens
        held = session.cache.nbytes()
        assert held.total == storage_bytes(session.cache)
        assert held.total - held.slack == session.cache.predicted_nbytes()
        assert reply.average_bits == pytest.approx((7 * 16 + 9 * (4 + 32 / 8) + 17 * (2 + 32 / 8)) / 33, rel=0.01)
        assert reply.search_s > 0


@pytest.mark.parametrize("source", SOURCES)
def test_with_all_tokens_in_16_bit_it_is_the_exact_cache(source: str) -> None:
    model, inputs, found = tiny_model(), video_inputs(), []
    share = {"fp16_share": 1.0, "int4_share": 0.0, "importance": source, "kv_dtype": "model"}
    for method in (get_method("token_level", **share), get_method("dynamic")):
        with method.bind(model) as bound:
            for protocol in ("context", "cached", "paper"):
                found.append(answer(bound, inputs, protocol, 8)[0].tokens)
    assert found[:3] == found[3:]


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_most_attended_tokens_stay_in_16_bit(pieces: int) -> None:
    """Against the attention weights that the eager implementation returns, layer by layer; a prefill in pieces too."""
    model, inputs = tiny_model(), video_inputs()
    prefix = {"input_ids": inputs["input_ids"][:, :36], "pixel_values_videos": inputs["pixel_values_videos"]}
    model.set_attn_implementation({"text_config": "eager"})
    with torch.no_grad():
        weights = model(**prefix, output_attentions=True).attentions
    model.set_attn_implementation({"text_config": "sdpa"})
    with get_method("token_level").bind(model) as bound, torch.no_grad():
        cache = bound.new_cache(inputs)
        if pieces == 1:
            model(**prefix, **{bound.cache_keyword: cache})
        else:
            caught = []
            hook = model.model.language_model.register_forward_pre_hook(
                lambda module, args, kwargs: caught.append(kwargs["inputs_embeds"]), with_kwargs=True
            )
            model(**prefix)
            hook.remove()
            for part in caught[0].split(12, dim=1):
                model(inputs_embeds=part, **{bound.cache_keyword: cache})
        for row, layer in zip(cache.planner.plan().bits, weights, strict=True):
            received = layer.double().sum((0, 1, 2))[3:]
            best = set(received.argsort(descending=True)[:7].tolist())
            assert {i for i, width in enumerate(row) if width == 16} == best


def test_similarity_is_that_of_a_window_of_one_token() -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("token_level", importance="similarity").bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 1)
        (scores,) = session.cache.stats.scores
        text = model.get_input_embeddings()(torch.cat([inputs["input_ids"][0, :3], inputs["input_ids"][0, 36:]]))
        visual = bound.visual_features(inputs)
    want = window_scores(visual if isinstance(visual, torch.Tensor) else visual.tokens, text, 1)
    torch.testing.assert_close(scores, want)
    assert len(set(reply.plan.bits)) == 1, "the same in all layers"


@pytest.mark.parametrize("source", SOURCES)
def test_batches_beams_and_text_alone(source: str) -> None:
    model = tiny_model()
    inputs = batch_inputs([video_ids(4, 3, 7) + video_ids(4, 0, 2), video_ids(4, 5, 3, seed=2)], 4)
    ids = torch.tensor([words(9)])
    want = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    with get_method("token_level", importance=source, kv_dtype="model").bind(model) as bound:
        for options in ({}, {"num_beams": 3}):
            cache = bound.new_cache(inputs)
            model.generate(**inputs, **{bound.cache_keyword: cache}, max_new_tokens=5, do_sample=False, **options)
            assert cache.packed and cache.nbytes().total == storage_bytes(cache)
        with pytest.warns(UserWarning, match="no visual tokens"):
            cache = bound.new_cache({"input_ids": ids})
        got = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            **{bound.cache_keyword: cache},
            max_new_tokens=6,
            do_sample=False,
        )
    assert torch.equal(got, want)


def test_the_model_is_as_before_afterwards() -> None:
    model = tiny_model()
    with get_method("token_level").bind(model):
        assert model.config.text_config._attn_implementation == "windowquant_token_level"
    assert model.config.text_config._attn_implementation == "sdpa"
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"importance": "luck"}, "use one of attention, similarity"),
        ({"fp16_share": 0.8, "int4_share": 0.3}, "sum to 1 at most"),
        ({"fp16_share": -0.1}, "0 or more"),
        ({"window_size": 8}, "window_size at 1"),
        ({"granularity": "window_channel"}, "token or coarser"),
    ],
)
def test_options_out_of_range_are_refused(params: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_method("token_level", **params)
