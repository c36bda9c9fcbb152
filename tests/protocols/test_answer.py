"""The three protocols against `generate`, and scoring of given answers."""

import pytest
import torch

from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.cache.packed_cache import PackedCache
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import answer

METHODS = {
    "windowquant": {"name": "windowquant", "window_size": 8, "sensitivity": (0.45, 0.6)},
    "uniform_int2": {"name": "uniform_int2", "window_size": 8},
    "rtn_int2": {"name": "rtn_int2", "window_size": 8},
    "fp16": {"name": "fp16"},
    "no_video": {"name": "no_video"},
    "dynamic": {"name": "dynamic"},
}
VIDEO_END, LENGTH = 36, 43
SPLIT = {"context": VIDEO_END, "cached": LENGTH - 1, "paper": LENGTH}


def generated(bound, inputs, split: int, new: int) -> list[int]:
    """Prefill `split` tokens, then let transformers' own generate go on from that cache."""
    model, ids, cache = bound.model, inputs["input_ids"], bound.new_cache(inputs)
    keyword = {bound.cache_keyword: cache}
    if split == ids.shape[1]:
        return model.generate(**inputs, **keyword, max_new_tokens=new, do_sample=False)[0, split:].tolist()
    pixels = inputs["pixel_values_videos"]
    with torch.no_grad():
        model(input_ids=ids[:, :split], pixel_values_videos=pixels, **keyword)
    out = model.generate(
        input_ids=ids, attention_mask=inputs["attention_mask"], **keyword, max_new_tokens=new, do_sample=False
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("protocol", SPLIT)
@pytest.mark.parametrize("name", METHODS)
def test_tokens_are_those_of_generate(name: str, protocol) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method(**METHODS[name]).bind(model) as bound:
        reply, _ = answer(bound, inputs, protocol, 8)
        assert reply.tokens == generated(bound, inputs, SPLIT[protocol], 8)
    assert len(reply.tokens) == 8 and not reply.stopped and len(reply.decode_s) == 7


@pytest.mark.parametrize("name", ["windowquant", "dynamic", "no_video"])
def test_a_stop_token_ends_the_answer_and_is_its_last(name: str) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method(**METHODS[name]).bind(model) as bound:
        free, _ = answer(bound, inputs, "context", 8)
        stop = free.tokens[3]
        reply, _ = answer(bound, inputs, "context", 8, stop_ids=[stop])
        first = free.tokens.index(stop) + 1
        assert reply.stopped and reply.tokens == free.tokens[:first]
        model.generation_config.eos_token_id = [stop, 1]
        assert answer(bound, inputs, "context", 8)[0].tokens == free.tokens[:first]
        model.generation_config.eos_token_id = stop
        assert answer(bound, inputs, "context", 8)[0].tokens == free.tokens[:first]
        assert len(answer(bound, inputs, "context", 1, stop_ids=())[0].tokens) == 1


@pytest.mark.parametrize("protocol", SPLIT)
@pytest.mark.parametrize("name", METHODS)
def test_logits_are_those_of_decoding_token_by_token(name: str, protocol) -> None:
    model, inputs, given = tiny_model(), video_inputs(), words(6, seed=11)
    with get_method(**METHODS[name]).bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, 5)
        own = session.logits(reply.tokens)
        assert own.shape == (5, 64) and own.dtype == torch.float32
        assert own.argmax(-1).tolist() == reply.tokens
        forced = session.logits(given)
        _, fresh = answer(bound, inputs, protocol, 1)
        steps = [fresh.first_logits, *(fresh._forward(input_ids=torch.tensor([[token]]))[-1] for token in given[:-1])]
        torch.testing.assert_close(forced, torch.stack(steps), atol=2e-4, rtol=2e-4)
        assert torch.equal(session.logits(given), forced), "scoring leaves the session as it was"
        assert session.logits([]).shape == (0, 64) and torch.equal(session.logits(given[:1]), forced[:1])


def test_the_first_token_is_blind_under_paper_and_under_no_other_protocol() -> None:
    model, inputs = tiny_model(), video_inputs()
    first = {}
    for name in ("fp16", "no_video"):
        with get_method(name, kv_dtype="model").bind(model) as bound:
            for protocol in SPLIT:
                first[name, protocol] = answer(bound, inputs, protocol, 1)[1].first_logits
    assert torch.equal(first["fp16", "paper"], first["no_video", "paper"])
    for protocol in ("context", "cached"):
        assert (first["fp16", protocol] - first["no_video", protocol]).abs().max() > 1e-2


@pytest.mark.parametrize("protocol", SPLIT)
def test_what_a_reply_reports(protocol) -> None:
    model, inputs = tiny_model(), video_inputs()
    with get_method("uniform_int2", window_size=8).bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, 4)
    assert (reply.protocol, reply.prompt_tokens, reply.visual_tokens) == (protocol, LENGTH, 33)
    assert reply.bits == pytest.approx({16: 1 / 33, 2: 32 / 33})
    # INT2 with a 16-bit scale and offset for 8 tokens is 6 bits an element; the newline stays in 16
    assert reply.average_bits == pytest.approx((32 * 6 + 16) / 33)
    token = 2 * 2 * 2 * 8 * 2  # layers, K and V, heads, channels, bytes
    assert reply.kv_predicted == token * (LENGTH + 3 - 32) + token * 32 * 6 // 16
    assert reply.kv.total - reply.kv.slack == reply.kv_predicted
    assert reply.search_s > 0 and reply.pack_s > 0 and reply.prefill_s > 0
    assert (reply.question_s > 0) == (protocol != "paper")
    assert reply.plan is not None and reply.plan.window_size == 8
    assert isinstance(session.cache, PackedCache) and session.cache.packed


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.bfloat16, 16)])
def test_what_a_reply_reports_of_a_cache_that_is_not_ours(dtype: torch.dtype, bits: int) -> None:
    model, inputs = tiny_model().to(dtype), video_inputs()
    inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(dtype)
    with get_method("dynamic").bind(model) as bound:
        reply, _ = answer(bound, inputs, "context", 4)
    assert reply.average_bits == bits and reply.bits == {} and reply.plan is None
    assert reply.kv.total == reply.kv_predicted == 2 * 2 * 2 * 8 * (LENGTH + 3) * bits // 8


def test_a_16_bit_model_runs_through() -> None:
    model, inputs = tiny_model().to(torch.bfloat16), video_inputs()
    inputs["pixel_values_videos"] = inputs["pixel_values_videos"].to(torch.bfloat16)
    want = model.generate(**inputs, max_new_tokens=5, do_sample=False)[0, LENGTH:].tolist()
    with get_method("fp16").bind(model) as bound:
        assert answer(bound, inputs, "paper", 5)[0].tokens == want
    with get_method(**METHODS["windowquant"]).bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 5)
        assert session.cache.layers[0].stored.kept.k.dtype == torch.bfloat16
        assert session.logits(reply.tokens).argmax(-1).tolist() == reply.tokens


@pytest.mark.parametrize("after", [0, 1, 2])
def test_prompts_that_end_with_the_video(after: int) -> None:
    model, inputs = tiny_model(), video_inputs(after=after)
    with get_method("uniform_int2", window_size=8).bind(model) as bound:
        for protocol in SPLIT:
            assert len(answer(bound, inputs, protocol, 3)[0].tokens) == 3


def test_wrong_requests_are_refused_in_words() -> None:
    model, inputs = tiny_model(), video_inputs()
    two = {key: torch.cat([value, value]) for key, value in inputs.items()}
    padded = batch_inputs([video_ids(8), video_ids(8, after=2)], 8)
    padded = {"input_ids": padded["input_ids"][1:], "attention_mask": padded["attention_mask"][1:]}
    with get_method("fp16").bind(model) as bound:
        with pytest.raises(UserError, match="Unknown protocol 'contxt'; known protocols: context, paper, cached"):
            answer(bound, inputs, "contxt")  # type: ignore[arg-type]
        with pytest.raises(UserError, match="2 rows;"):
            answer(bound, two)
        with pytest.raises(UserError, match="with padding"):
            answer(bound, padded)
        with pytest.raises(UserError, match="max_new_tokens is 0"):
            answer(bound, inputs, max_new_tokens=0)
