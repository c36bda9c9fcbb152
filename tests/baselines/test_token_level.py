"""Mixed precision per token."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.qwen2.modeling_qwen2 import eager_attention_forward

from baselines import token_level
from tests.cache.test_nbytes import storage_bytes
from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.core.importance import balance
from windowquant.core.quantizer import dequantize, quantize
from windowquant.core.similarity import window_scores
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.models import cache_keyword
from windowquant.protocols import Session, answer

SOURCES = ["attention", "similarity"]
MIKV = {"fp16_share": 0.2, "int4_share": 0.0, "recent_share": 0.1, "per_head": True, "balance": True}
SPLITS = [{"per_head": True}, {"balance": True}, {"recent_share": 0.2}, MIKV]
NAMES = ["per_head", "balance", "recent", "mikv"]
VIDEO = slice(3, 36)  # columns of `video_inputs()`


@pytest.mark.parametrize(
    ("k", "codes", "scale", "want"),
    [
        ([2, -2, 0.9, 0.5], [3, 0, 2, 2], 4 / 3, [2, -2, 2 / 3, 2 / 3]),  # MiKV's example: k [1, -4, .3, .5] balanced
        ([1, -4, 0.3, 0.5], [3, 0, 3, 3], 5 / 3, [1, -4, 1, 1]),  # and as they are
    ],
)
def test_numbers_of_the_low_tier(k: list[float], codes: list[int], scale: float, want: list[float]) -> None:
    block = quantize(torch.tensor(k).view(1, 1, 1, 1, 4), 2, "token", "float")
    got = dequantize(block).flatten()
    assert float(block.scale) == pytest.approx(scale) and got.tolist() == pytest.approx(want, abs=1e-5)
    assert torch.round((got - min(k)) / scale).tolist() == codes
    factors = balance(torch.tensor([4.0, 1, 9, 0.5]), torch.tensor([1.0, 4, 1, 0.5]))
    read = [1, -4, 0.222222, 0.666667] if codes[2] == 2 else [1, -4, 1, 1]
    assert (got / (factors if codes[2] == 2 else 1)).tolist() == pytest.approx(read, abs=1e-5)


def coded(x: Tensor, bits: int) -> Tensor:
    """One head of one token [D] in `bits` bits with a 16-bit scale and minimum, by a plain loop."""
    if bits == 16:
        return x.half().double()
    x = x.half()
    scale = ((x.max().float() - x.min().float()) / (2**bits - 1)).half().double()
    low = x.min().double()
    return torch.stack([low + scale * ((value.double() - low) / scale).round().clamp(0, 2**bits - 1) for value in x])


def states(model, prefix: dict) -> tuple[list[Tensor], list[Tensor], DynamicCache]:
    """Queries [Hq, T, D] and attention weights [Hq, T, T] of every layer, from the eager implementation, and the
    cache."""
    queries: list[Tensor] = []

    def eager(module, query, key, value, mask, **kwargs):
        queries.append(query[0])
        return eager_attention_forward(module, query, key, value, mask, **kwargs)

    AttentionInterface.register("watched_eager", eager)
    AttentionMaskInterface.register("watched_eager", eager_mask)
    model.set_attn_implementation({"text_config": "watched_eager"})
    cache = DynamicCache(config=model.config.text_config)
    with torch.no_grad():
        weights = model(**prefix, output_attentions=True, **{cache_keyword(model): cache}).attentions
    model.set_attn_implementation({"text_config": "sdpa"})
    return queries, [layer[0].double() for layer in weights], cache


@pytest.mark.parametrize("split", SPLITS, ids=NAMES)
def test_question_reads_what_a_plain_loop_over_heads_and_tokens_stores(split: dict) -> None:
    """Tiers, balancer and codes of every head and token worked out one by one and put into transformers' own cache."""
    model, inputs = tiny_model(), video_inputs()
    prefix = {"input_ids": inputs["input_ids"][:, :36], "pixel_values_videos": inputs["pixel_values_videos"]}
    method = get_method("token_level", **split)
    queries, weights, cache = states(model, prefix)
    top, middle = round(33 * method.fp16_share), round(33 * (method.fp16_share + method.int4_share))
    newest = round(33 * method.recent_share)
    for layer, query, weight in zip(cache.layers, queries, weights, strict=True):
        k, v = layer.keys[0].double(), layer.values[0].double()
        received = weight.unflatten(0, (2, 3)).sum((1, 2))[:, VIDEO]
        for head in range(2):
            score = (received if method.per_head else received.sum(0, keepdim=True).expand(2, -1))[head]
            rest = score[: 33 - newest].argsort(descending=True).tolist()
            ranking = [*range(33 - newest, 33), *rest]
            factors = torch.ones(8, dtype=torch.float64)
            if method.balance:
                for channel in range(8):
                    largest = max(float(query[3 * head + i, :, channel].abs().max()) for i in range(3))
                    factors[channel] = (largest / float(k[head, :, channel].abs().max())) ** 0.5
                factors = factors.half().double()
            for rank, token in enumerate(ranking):
                bits = 16 if rank < top else 4 if rank < middle else 2
                column = 3 + token
                k[head, column] = coded((k[head, column] * factors).float(), bits) / factors
                v[head, column] = coded(v[head, column].float(), bits)
        layer.keys, layer.values = k[None].float(), v[None].float()
    question = inputs["input_ids"][:, 36:]
    with torch.no_grad():
        want = model(input_ids=question, **{cache_keyword(model): cache}).logits
        plain = model(**inputs).logits[:, 36:]
        with method.bind(model) as bound:
            held = bound.new_cache(inputs)
            model(**prefix, **{bound.cache_keyword: held})
            got = model(input_ids=question, **{bound.cache_keyword: held}).logits
    assert float((got - want).abs().max()) < 0.02 * float((got - plain).abs().max())


@pytest.mark.parametrize("protocol", ["context", "cached", "paper"])
def test_ranks_and_balance_change_nothing_where_nothing_is_coded(protocol: str) -> None:
    """(q / b) . (k b) = q . k, and attention does not see in which order a head keeps its tokens."""
    model, inputs = tiny_model(), video_inputs()
    share = {"fp16_share": 0.5, "int4_share": 0.5, "recent_share": 0.1, "kv_dtype": "model"}
    method = get_method("token_level", **share, per_head=True, balance=True)
    with get_method("dynamic").bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, 8)
        want = session.logits(reply.tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_level, "_WIDTHS", (16, 16, 2))
        with method.bind(model) as bound:
            layer = Session(bound, inputs, protocol).cache.layers[1]
            torch.testing.assert_close(
                Session(bound, inputs, protocol).logits(reply.tokens), want, atol=1e-3, rtol=1e-3
            )
    assert layer.factors.shape == (1, 2, 1, 8) and float((layer.factors - 1).abs().min()) > 1e-3


@pytest.mark.parametrize("split", [{}, *SPLITS], ids=["plain", *NAMES])
def test_a_saved_cache_goes_on_as_the_kept_one(split: dict, tmp_path: Path) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("token_level", **split).bind(model) as bound:
        session = Session(bound, inputs)
        held = session.cache.nbytes()
        assert held.total == storage_bytes(session.cache)
        assert held.total - held.slack == session.cache.predicted_nbytes()
        session.cache.save(tmp_path / "cache.safetensors")
        want = session.logits([9, 8, 7])
        session.cache = bound.load_cache(tmp_path / "cache.safetensors", inputs)
        assert torch.equal(session.logits([9, 8, 7]), want)
        assert session.cache.nbytes().total == storage_bytes(session.cache)


def test_newest_tokens_are_kept_by_similarity_too() -> None:
    with get_method("token_level", importance="similarity", recent_share=0.2).bind(tiny_model()) as bound:
        reply, _ = answer(bound, video_inputs(), "context", 1)
    assert all(row[-7:] == (16,) * 7 and row.count(16) == 7 for row in reply.plan.bits)


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


@pytest.mark.parametrize("options", [{"importance": source} for source in SOURCES] + SPLITS, ids=[*SOURCES, *NAMES])
def test_batches_beams_and_text_alone(options: dict) -> None:
    model = tiny_model()
    inputs = batch_inputs([video_ids(4, 3, 7) + video_ids(4, 0, 2), video_ids(4, 5, 3, seed=2)], 4)
    ids = torch.tensor([words(9)])
    want = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    with get_method("token_level", **options, kv_dtype="model").bind(model) as bound:
        for search in ({}, {"num_beams": 3}):
            cache = bound.new_cache(inputs)
            model.generate(**inputs, **{bound.cache_keyword: cache}, max_new_tokens=5, do_sample=False, **search)
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
        ({"recent_share": 0.3}, "recent_share is 0.3"),
        ({"recent_share": -0.1}, "0 or more"),
        ({"per_head": True, "importance": "similarity"}, "per_head is seen in the attention"),
        ({"balance": "yes"}, "set it to true or false"),
        ({"window_size": 8}, "window_size at 1"),
        ({"granularity": "window_channel"}, "token or coarser"),
    ],
)
def test_options_out_of_range_are_refused(params: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_method("token_level", **params)
