"""Every way of decoding: with a 16-bit cache it does what it does without us, with a packed one it reads that one."""

from typing import Any

import pytest
import torch
from transformers import (
    MaxLengthCriteria,
    Qwen2Config,
    Qwen2ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

from tests.architectures import batch_inputs
from tests.generation.common import EXACT, NAMES, WINDOWQUANT, asked, generate, loaded, same_steps
from windowquant.errors import UserError
from windowquant.method import get_method

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "repetition": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "guesses from the prompt": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_with_16_bits_as_without_us(name: str, way: str) -> None:
    (model, _), inputs = loaded(name), asked(name)
    torch.manual_seed(3)
    want = generate(model, inputs, **WAYS[way])
    with get_method(**EXACT).bind(model) as bound:
        torch.manual_seed(3)
        assert same_steps(generate(model, inputs, bound.new_cache(inputs), **WAYS[way]), want)


@pytest.mark.parametrize("way", ["greedy", "sampling", "several samples", "beams"])
@pytest.mark.parametrize("name", NAMES)
def test_batches_with_left_padding(name: str, way: str) -> None:
    (model, processor) = loaded(name)
    inputs, alone = batch_inputs(name, processor)
    assert not inputs["attention_mask"].all()
    torch.manual_seed(3)
    want = generate(model, inputs, **WAYS[way])
    with get_method(**EXACT).bind(model) as bound:
        torch.manual_seed(3)
        assert same_steps(generate(model, inputs, bound.new_cache(inputs), **WAYS[way]), want)
    if way == "greedy":
        for row, single in enumerate(alone):
            new = generate(model, single).sequences[0, single["input_ids"].shape[1] :]
            assert torch.equal(want.sequences[row, inputs["input_ids"].shape[1] :], new)


@pytest.mark.parametrize("way", [way for way in WAYS if not way.startswith("guesses")])
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_cache_is_what_is_read(name: str, way: str) -> None:
    """The logits of every step are those of a teacher-forced pass over the same packed cache."""
    (model, _), inputs = loaded(name), asked(name)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        torch.manual_seed(3)
        out = generate(model, bound.resume(cache, inputs), **WAYS[way])
        length, exact = inputs["input_ids"].shape[1], get_method(**EXACT)
        expected = [_forced(bound, cache, inputs, row) for row in out.sequences]
    if "num_beams" not in WAYS[way]:
        for step, logits in enumerate(out.logits):
            torch.testing.assert_close(logits, torch.stack([e[step] for e in expected]), atol=1e-4, rtol=1e-4)
    with exact.bind(model) as bound:
        plain = _forced(bound, bound.encode(inputs), inputs, out.sequences[0])
    assert (plain - expected[0]).abs().max() > 1e-3, "quantization changes the answer's logits"
    assert len(expected[0]) == out.sequences.shape[1] - length


def _forced(bound, cache, inputs, sequence):
    """Logits [n, V] for the n tokens of `sequence` after the prompt, each given the tokens before it, in one pass."""
    length = inputs["input_ids"].shape[1]
    bound.resume(cache, inputs)  # keeps all of the prompt but its last token, which is run again
    start = cache.get_seq_length()
    with torch.no_grad():
        logits = bound.model(input_ids=sequence[None, start:-1], **{bound.cache_keyword: cache}).logits[0]
    return logits[length - 1 - start :]


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["search", "sampling"])
@pytest.mark.parametrize("name", NAMES)
def test_beams_score_what_a_teacher_forced_pass_gives(name: str, options: dict[str, Any]) -> None:
    (model, _), inputs = loaded(name), asked(name)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        torch.manual_seed(5)
        beams = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 1.0, "output_scores": True, **options}
        out = generate(model, bound.resume(cache, inputs), **beams)
        for sequence, score in zip(out.sequences, out.sequences_scores, strict=True):
            logits, new = _forced(bound, cache, inputs, sequence), sequence[inputs["input_ids"].shape[1] :]
            total = logits.double().log_softmax(-1).gather(1, new[:, None]).sum()
            assert float(score) == pytest.approx(float(total) / len(new), abs=1e-4)


@pytest.mark.parametrize("name", ["llava_onevision", "internvl"])  # transformers' own assistants know no M-RoPE
def test_guesses_of_a_smaller_model(name: str) -> None:
    """Assisted decoding: the answer is the greedy one, whatever a smaller model proposes."""
    (model, processor), inputs = loaded(name), asked(name)
    config = Qwen2Config(
        vocab_size=len(processor.tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    options = {"assistant_model": Qwen2ForCausalLM(config).eval(), "max_new_tokens": 16}
    want = generate(model, inputs, max_new_tokens=16).sequences
    with get_method(**EXACT).bind(model) as bound:
        cache = bound.new_cache(inputs)
        assert torch.equal(generate(model, inputs, cache, **options).sequences, want)
        assert cache.get_seq_length() == want.shape[1] - 1
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.new_cache(inputs)
        assert generate(model, inputs, cache, **options).sequences.shape == want.shape and cache.packed


@pytest.mark.parametrize("name", NAMES)
def test_guesses_start_with_a_new_cache(name: str) -> None:
    """Transformers runs the whole prompt again then, which would go wrong unnoticed."""
    (model, _), inputs = loaded(name), asked(name)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        given = bound.resume(bound.encode(inputs), inputs)
        with pytest.raises(UserError, match="assisted decoding does; give it a new cache"):
            generate(model, given, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("options", [{"penalty_alpha": 0.6, "top_k": 4}, {"num_beams": 4, "num_beam_groups": 2}])
def test_what_transformers_no_longer_ships_is_refused_by_it(options: dict[str, Any]) -> None:
    """Contrastive and group beam search live on the hub now; nothing of ours is needed to say so."""
    (model, _), inputs = loaded("llava_onevision"), asked("llava_onevision")
    with (
        get_method(**WINDOWQUANT).bind(model) as bound,
        pytest.raises(ValueError, match="custom_generate|trust_remote"),
    ):
        generate(model, inputs, bound.new_cache(inputs), **options)


class _After(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("name", NAMES)
def test_stopping_criteria(name: str) -> None:
    (model, _), inputs = loaded(name), asked(name)
    length = inputs["input_ids"].shape[1]
    with get_method(**WINDOWQUANT).bind(model) as bound:
        free = generate(model, inputs, bound.new_cache(inputs)).sequences[0, length:].tolist()
        for criterion, stop in ((_After(free[4]), free.index(free[4]) + 1), (MaxLengthCriteria(length + 3), 3)):
            cache = bound.new_cache(inputs)
            out = generate(model, inputs, cache, stopping_criteria=StoppingCriteriaList([criterion]), pad_token_id=0)
            assert out.sequences[0, length:].tolist() == free[:stop]
            assert cache.get_seq_length() == length + stop - 1
        ended = generate(model, inputs, bound.new_cache(inputs), eos_token_id=free[4], pad_token_id=0)
        assert ended.sequences[0, length:].tolist() == free[: free.index(free[4]) + 1]


@pytest.mark.parametrize("name", NAMES)
def test_streamers(name: str) -> None:
    (model, processor), inputs = loaded(name), asked(name)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        streamer = TextIteratorStreamer(processor.tokenizer, skip_prompt=True)
        out = generate(model, inputs, bound.new_cache(inputs), streamer=streamer)
        new = out.sequences[0, inputs["input_ids"].shape[1] :]
        assert "".join(streamer) == processor.tokenizer.decode(new)


def test_a_long_answer_keeps_its_16_bits() -> None:
    """512 tokens: what was decoded is stored as it was computed, and what was packed did not move."""
    (model, _), inputs = loaded("llava_onevision"), asked("llava_onevision")
    length, new = inputs["input_ids"].shape[1], 512
    with get_method(**WINDOWQUANT, kv_dtype="model").bind(model) as bound:
        cache = bound.new_cache(inputs)
        short = generate(model, inputs, cache, max_new_tokens=1)
        blocks = [block.codes.clone() for layer in cache.layers for block in layer.stored.blocks()]
        assert blocks
        prefix = [layer.stored.kept.length for layer in cache.layers]
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        first = cache.layers[0]
        append = first.stored.kept.append
        first.stored.kept.append = lambda k, v: (seen.append((k.clone(), v.clone())), append(k, v))
        longer = {"input_ids": short.sequences, "attention_mask": torch.ones_like(short.sequences)}
        out = generate(model, longer, cache, max_new_tokens=new - 1)
        assert out.sequences.shape[1] == length + new and cache.get_seq_length() == length + new - 1
        kept = first.stored.kept
        assert torch.equal(kept.k[:, :, prefix[0] :], torch.cat([k for k, _ in seen], 2))
        assert torch.equal(kept.v[:, :, prefix[0] :], torch.cat([v for _, v in seen], 2))
        held = [block.codes for layer in cache.layers for block in layer.stored.blocks()]
        assert all(torch.equal(a, b) for a, b in zip(blocks, held, strict=True))
