"""Without quantization the model computes exactly what it does without us."""

import pytest
import torch

from tests.vlm import batch_inputs, tiny_model, video_ids, video_inputs, words
from windowquant.method import get_method
from windowquant.models import cache_keyword

SHAPES = [(6, 2, 8), (7, 1, 8), (4, 4, 16), (2, 1, 32)]
EXACT = {"name": "fp16", "kv_dtype": "model"}


def generate(model, inputs, cache=None, **options):
    extra = {} if cache is None else {cache_keyword(model): cache}
    return model.generate(
        **inputs, **extra, max_new_tokens=10, output_logits=True, return_dict_in_generate=True, **options
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_bit_identical_to_generate_without_us(shape) -> None:
    model, inputs = tiny_model(*shape), video_inputs()
    want = generate(model, inputs, do_sample=False)
    with get_method(**EXACT).bind(model) as bound:
        have = generate(model, inputs, bound.new_cache(inputs), do_sample=False)
    assert torch.equal(have.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(have.logits, want.logits, strict=True))


def test_default_storage_gives_the_same_tokens() -> None:
    model, inputs = tiny_model(), video_inputs()
    want = generate(model, inputs, do_sample=False).sequences
    with get_method("fp16").bind(model) as bound:
        cache = bound.new_cache(inputs)
        assert torch.equal(generate(model, inputs, cache, do_sample=False).sequences, want)
        assert cache.layers[0].stored.kept.k.dtype == torch.float16


BATCHES = {
    "same length": [video_ids(8, 3, 7, 0), video_ids(8, 3, 7, 5)],
    "padded, same video length": [video_ids(4, 3, 12), video_ids(4, 2, 5)],
    "video and text only": [video_ids(4, 3, 7), words(9)],
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_bit_identical(name: str) -> None:
    model = tiny_model()
    frames = 8 if name == "same length" else 4
    inputs = batch_inputs(BATCHES[name], frames)
    want = generate(model, inputs, do_sample=False)
    with get_method(**EXACT).bind(model) as bound:
        have = generate(model, inputs, bound.new_cache(inputs), do_sample=False)
    assert torch.equal(have.sequences, want.sequences)
    assert all(torch.equal(a, b) for a, b in zip(have.logits, want.logits, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "temperature": 0.7},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3, "do_sample": False},
        {"num_beams": 4, "num_return_sequences": 2, "do_sample": False},
    ],
    ids=["sampling", "several samples", "beams", "several beams"],
)
@pytest.mark.parametrize("batch", [None, "same length", "padded, same video length"])
def test_other_ways_to_decode(options, batch: str | None) -> None:
    model = tiny_model()
    inputs = video_inputs() if batch is None else batch_inputs(BATCHES[batch], 8 if batch == "same length" else 4)
    torch.manual_seed(3)
    want = generate(model, inputs, **options).sequences
    with get_method(**EXACT).bind(model) as bound:
        torch.manual_seed(3)
        assert torch.equal(generate(model, inputs, bound.new_cache(inputs), **options).sequences, want)


@pytest.mark.parametrize("split", [4, 20, 35, 40])
def test_prefill_in_pieces_is_bit_identical(split: int) -> None:
    """Two plain passes (the first one may end inside the video, when embeddings are given), then generate."""
    model, inputs = tiny_model(), video_inputs()
    dynamic, exact = get_method("dynamic"), get_method(**EXACT)
    results = []
    for method in (dynamic, exact):
        with method.bind(model) as bound, torch.no_grad():
            embeds = model.get_input_embeddings()(inputs["input_ids"])
            embeds[0, bound.adapter.prompt(model, inputs).visual[0]] = bound.visual_features(inputs).tokens
            keyword, cache = bound.cache_keyword, bound.new_cache(inputs)
            first = model(inputs_embeds=embeds[:, :split], **{keyword: cache}).logits
            second = model(inputs_embeds=embeds[:, split:], **{keyword: cache}).logits
            results.append((first, second))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
