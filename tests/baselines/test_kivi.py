"""KIVI against its official schedule and numbers."""

import pytest
import torch

from tests.architectures import build
from tests.architectures import video_inputs as inputs_for
from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.cache.streaming.codecs import GroupCodec
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import answer

SMALL = {"group": 4, "residual": 8, "k_bits": 4, "v_bits": 4}


def kivi(**params):
    return get_method("kivi", **{**SMALL, **params})


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize(
    ("values", "bits", "codes", "scale", "minimum", "want"),
    [
        ([-1, 0, 0.5, 2], 2, [0, 1, 2, 3], 1, -1, [-1, 0, 1, 2]),
        ([0, 0.5, 1.5, 3], 2, [0, 0, 2, 3], 1, 0, [0, 0, 2, 3]),
        ([0.1, -0.37, 1.25, 0.8], 2, [1, 0, 3, 2], 0.540039, -0.370117, [0.169922, -0.370117, 1.25, 0.709961]),
        ([0.1, -0.37, 1.25, 0.8], 4, [4, 0, 15, 11], 0.108032, -0.370117, [0.062012, -0.370117, 1.25, 0.818359]),
    ],
)
def test_numbers_of_the_official_code(axis, values, bits, codes, scale, minimum, want) -> None:
    """In float16; the official code rounds the result to it as well."""
    x = torch.tensor(values, dtype=torch.float16)
    x = x.view(1, 1, 4, 1).expand(1, 1, 4, 8) if axis == "channel" else x.view(1, 1, 1, 4)
    codec = GroupCodec(bits, 4, axis)
    parts = codec.encode(x, "x")
    assert float(parts[1].flatten()[0]) == pytest.approx(scale, abs=5e-7)
    assert float(parts[2].flatten()[0]) == pytest.approx(minimum, abs=5e-7)
    got = codec.decode(parts, 1)
    row = got[0, 0, :, 0] if axis == "channel" else got[0, 0, 0]
    assert torch.round((row - parts[2].flatten()[0].float()) / parts[1].flatten()[0].float()).tolist() == codes
    assert row.half().tolist() == pytest.approx(want, abs=5e-7)


def lengths(cache) -> tuple[int, int, int, int]:
    """(coded K, exact K, coded V, exact V) of the first layer."""
    (group,) = cache.layers[0].groups
    return tuple(n for track in (group.k, group.v) for n in (track.coded_end, track.length - track.coded_end))


@pytest.mark.parametrize(
    ("prefill", "expected", "steps"),
    [
        (100, (0, 100, 0, 100), {28: (128, 0, 0, 128)}),
        (128, (128, 0, 0, 128), {}),
        (129, (128, 1, 1, 128), {}),
        (300, (256, 44, 172, 128), {84: (384, 0, 256, 128), 90: (384, 6, 262, 128)}),
    ],
)
@pytest.mark.parametrize("at_once", [False, True])
def test_official_schedule(prefill: int, expected, steps: dict, at_once: bool) -> None:
    """The residual of 128 tokens; `at_once`: later tokens come in updates of several."""
    model = tiny_model(layers=1)
    frames, rest = divmod(prefill - 1, 4)
    inputs = video_inputs(frames, before=rest, after=1)
    ids = inputs["input_ids"]
    with kivi(residual=128).bind(model) as bound, torch.no_grad():
        cache = {bound.cache_keyword: bound.new_cache(inputs)}
        model(input_ids=ids[:, :prefill], pixel_values_videos=inputs["pixel_values_videos"], **cache)
        assert lengths(cache[bound.cache_keyword]) == expected
        done = 0
        later = [int(ids[0, -1]), *words(max(steps, default=1))]
        for step, want in steps.items():
            size = step - done if at_once else 1
            for start in range(done, step, size):
                model(input_ids=torch.tensor([later[start : start + size]]), **cache)
            done = step
            assert lengths(cache[bound.cache_keyword]) == want


@pytest.mark.parametrize("protocol", ["context", "cached", "paper"])
def test_answers_are_those_of_generate_and_scores_those_of_decoding(protocol) -> None:
    model, inputs, given = tiny_model(), video_inputs(), words(20, seed=3)
    split = {"context": 36, "cached": 42, "paper": 43}[protocol]
    with kivi().bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, 24)
        cache = bound.new_cache(inputs)
        keyword, ids = {bound.cache_keyword: cache}, inputs["input_ids"]
        options = {"attention_mask": inputs["attention_mask"], "max_new_tokens": 24, "do_sample": False}
        if split < 43:
            with torch.no_grad():
                pixels = inputs["pixel_values_videos"]
                model(input_ids=ids[:, :split], pixel_values_videos=pixels, **keyword)
            out = model.generate(input_ids=ids, **keyword, **options)
        else:
            out = model.generate(**inputs, **keyword, max_new_tokens=24, do_sample=False)
        assert reply.tokens == out[0, 43:].tolist()
        assert session.logits(reply.tokens).argmax(-1).tolist() == reply.tokens
        forced = session.logits(given)
        _, fresh = answer(bound, inputs, protocol, 1)
        steps = [fresh.first_logits, *(fresh._forward(input_ids=torch.tensor([[t]]))[-1] for t in given[:-1])]
        torch.testing.assert_close(forced, torch.stack(steps), atol=2e-4, rtol=2e-4)
        assert torch.equal(session.logits(given), forced)


def test_a_residual_longer_than_everything_is_the_exact_cache() -> None:
    model, inputs = tiny_model(), video_inputs()
    results = []
    for method in (kivi(residual=400, k_bits=2, v_bits=2, kv_dtype="model"), get_method("dynamic")):
        with method.bind(model) as bound:
            reply, session = answer(bound, inputs, "context", 30)
            results.append((reply.tokens, session.logits(reply.tokens)))
    assert results[0][0] == results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-4)


def test_more_bits_are_closer() -> None:
    model, inputs, given = tiny_model(), video_inputs(), words(10, seed=5)
    with get_method("dynamic").bind(model) as bound:
        exact = answer(bound, inputs, "context", 1)[1].logits(given).log_softmax(-1)
    found = []
    for bits in (8, 4, 2):
        with kivi(k_bits=bits, v_bits=bits).bind(model) as bound:
            other = answer(bound, inputs, "context", 1)[1].logits(given).log_softmax(-1)
        found.append(float((exact.exp() * (exact - other)).sum(-1).mean()))
    assert found == sorted(found) and found[0] < 0.01


@pytest.mark.parametrize(("bits", "want"), [(2, 2 + 32 / 4), (4, 4 + 32 / 4)])
def test_bytes_are_those_held_and_those_of_the_formula(bits: int, want: float) -> None:
    from tests.cache.test_nbytes import storage_bytes

    model, inputs = tiny_model(), video_inputs()
    with kivi(k_bits=bits, v_bits=bits, residual=4).bind(model) as bound:
        assert bound.new_cache(inputs).nbytes().total == 0
        for new in (1, 6, 40):
            reply, session = answer(bound, inputs, "context", new)
            held = session.cache.nbytes()
            assert held.total == storage_bytes(session.cache) == reply.kv.total
            assert held.total - held.slack == session.cache.predicted_nbytes() == reply.kv_predicted
        assert reply.average_bits == pytest.approx(want, rel=0.01), "every visual token is coded by now"
        assert session.cache.stats.bits == {bits: 1.0}
        assert held.fp16_windows == 0 and held.tail > 0
    with kivi(residual=40).bind(model) as bound:
        reply, session = answer(bound, inputs, "paper", 1)
        assert reply.bits == pytest.approx({16: 0.5, 4: 0.5})  # coded: the first 40 columns of K, the first 3 of V
        assert reply.kv.total == storage_bytes(session.cache)


def test_a_row_does_not_depend_on_its_batch() -> None:
    model = tiny_model()
    rows = [video_ids(4, 3, 7) + video_ids(4, 0, 2), video_ids(4, 5, 3, seed=2), words(9)]
    inputs, new = batch_inputs(rows, 4), 14
    pixels, videos = inputs["pixel_values_videos"], [2, 1, 0]
    with kivi().bind(model) as bound:
        options = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        cache = bound.new_cache(inputs)
        together = model.generate(**inputs, **{bound.cache_keyword: cache}, **options)
        used = 0
        for row, count in enumerate(videos):
            alone = {"input_ids": torch.tensor([rows[row]])}
            alone["attention_mask"] = torch.ones_like(alone["input_ids"])
            if count:
                alone["pixel_values_videos"] = pixels[used : used + count]
            used += count
            single = model.generate(**alone, **{bound.cache_keyword: bound.new_cache(alone)}, **options)
            assert together.sequences[row, -new:].tolist() == single.sequences[0, -new:].tolist()
            for a, b in zip(together.logits, single.logits, strict=True):
                torch.testing.assert_close(a[row], b[0], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("padded", [False, True])
def test_beams_and_several_sequences(padded: bool) -> None:
    """With a residual that holds everything, beam search finds what it finds on transformers' own cache."""
    from tests.cache.test_nbytes import storage_bytes

    model = tiny_model()
    rows = [video_ids(4, 3, 7), video_ids(4, 5, 3 if padded else 5, seed=2)]
    inputs, found = batch_inputs(rows, 4), []
    options = {"max_new_tokens": 10, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    for method in (kivi(residual=400, kv_dtype="model"), get_method("dynamic"), kivi(), kivi()):
        with method.bind(model) as bound:
            cache = bound.new_cache(inputs)
            found.append(model.generate(**inputs, **{bound.cache_keyword: cache}, **options).tolist())
            if method.name == "kivi":
                assert cache.nbytes().total == storage_bytes(cache)
    assert found[0] == found[1] and found[2] == found[3]


@pytest.mark.parametrize("name", ["llava_onevision", "qwen2_vl", "internvl", "llava_next"])
def test_runs_on_other_architectures(name: str) -> None:
    model, processor = build(name)
    inputs = inputs_for(name, processor)
    with kivi(k_bits=8, v_bits=8, kv_dtype="model").bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 12)
        near = session.logits(reply.tokens).log_softmax(-1)
    with get_method("dynamic").bind(model) as bound:
        exact = answer(bound, inputs, "context", 1)[1].logits(reply.tokens).log_softmax(-1)
    assert float((exact.exp() * (exact - near)).sum(-1).mean()) < 0.01


def test_a_constant_prompt_and_text_alone_are_no_trouble() -> None:
    model = tiny_model()
    for row in ([9] * 30, words(30)):
        ids = torch.tensor([row])
        with kivi(k_bits=2, v_bits=2).bind(model) as bound:
            out = model.generate(
                input_ids=ids, **{bound.cache_keyword: bound.new_cache({"input_ids": ids})}, max_new_tokens=20
            )
            assert out.shape == (1, 50)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"residual": 100}, "multiple of group"),
        ({"group": 0}, "multiple of group"),
        ({"k_bits": 3}, "cannot be packed"),
        ({"group": 2, "residual": 8, "v_bits": 2}, "whole bytes"),
        ({"window_size": 8}, "no hyper-parameter 'window_size'"),
        ({"granularity": "token"}, "no hyper-parameter 'granularity'"),
    ],
)
def test_options_that_do_not_fit_are_refused(params: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        get_method("kivi", **params)


def test_a_model_whose_heads_a_group_does_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="Groups of 32 channels do not divide this model's head_dim 8"):
        get_method("kivi").bind(tiny_model())


def test_what_a_streaming_cache_cannot_do_it_says() -> None:
    model, inputs = tiny_model(), video_inputs()
    with kivi().bind(model) as bound:
        _, session = answer(bound, inputs, "context", 3)
        with pytest.raises(UserError, match="cannot be cropped"):
            session.cache.crop(-1)
        with pytest.raises(UserError, match="run the prefill first"):
            bound.new_cache(inputs).reorder_cache(torch.tensor([0]))
        right = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
        right["attention_mask"][0, -1] = 0
        with pytest.raises(UserError, match="on the left only"):
            bound.new_cache(right)
        with pytest.raises(UserError, match="new_cache"):
            session.cache.layers[0].reset()
    with pytest.raises(UserError, match="not bound"):
        session.step(9)
