"""Several questions about one packed video, in turn or one after the other."""

import pytest
import torch

from tests.architectures import Ask, frames, process, text_inputs, video_inputs
from tests.generation.common import EXACT, NAMES, WHAT, WHY, WINDOWQUANT, asked, close_steps, generate, loaded
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import answer


def ids_only(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("name", [*NAMES, "qwen2_5_vl", "qwen3_vl"])
def test_each_question_is_answered_as_on_its_own(name: str) -> None:
    """Encoded once, asked in any order, with requests about other videos in between."""
    model, _ = loaded(name)
    questions = [asked(name, WHAT), asked(name, WHY), asked(name, "who?"), asked(name, WHAT)]
    want = [generate(model, inputs) for inputs in questions]
    with get_method(**EXACT).bind(model) as bound:
        cache = bound.encode(questions[1])
        for inputs, expected in zip(questions, want, strict=True):
            other = asked(name, "and this?", seed=9)
            generate(model, other, bound.new_cache(other), max_new_tokens=2)
            assert close_steps(generate(model, bound.resume(cache, inputs)), expected)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_and_asking_is_the_context_protocol(name: str) -> None:
    (model, _), inputs, other = loaded(name), asked(name, WHAT), asked(name, WHY)
    with get_method(**WINDOWQUANT).bind(model) as bound:
        reply, _ = answer(bound, inputs, "context", 8)
        cache = bound.encode(inputs)
        blocks = [block.codes for layer in cache.layers for block in layer.stored.blocks()]
        video = cache.get_seq_length()
        assert cache.packed and video == cache.request.prompt.visual_end
        for question in (inputs, other, inputs):
            out = generate(model, bound.resume(cache, question)).sequences[0]
            if question is inputs:
                assert out[inputs["input_ids"].shape[1] :].tolist() == reply.tokens
        after = [block.codes for layer in cache.layers for block in layer.stored.blocks()]
        assert all(a is b for a, b in zip(blocks, after, strict=True)), "the packed part is neither copied nor remade"
        assert cache.stats.plan == reply.plan, "the plan stays that of the prompt that was encoded"


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_in_turns(name: str) -> None:
    """Its ids grow; the pixels are given once. Both ways to go on equal one long prompt."""
    (model, _), inputs = loaded(name), asked(name)
    more = asked(name, WHY)["input_ids"][:, -len(WHY) :]
    with get_method(**EXACT).bind(model) as bound:
        for by_resume in (False, True):
            cache = bound.new_cache(inputs)
            first = generate(model, inputs, cache).sequences
            longer = torch.cat([first, more], 1)
            foreign = asked(name, seed=9)
            generate(model, foreign, bound.new_cache(foreign), max_new_tokens=2)
            given = bound.resume(cache, ids_only(longer)) if by_resume else ids_only(longer)
            second = generate(model, given, None if by_resume else cache)
            third = generate(model, bound.resume(cache, ids_only(torch.cat([second.sequences, more], 1))))
            whole = process_longer(inputs, longer)
            assert close_steps(second, generate(model, whole, bound.new_cache(whole)))
            whole = process_longer(inputs, torch.cat([second.sequences, more], 1))
            assert close_steps(third, generate(model, whole, bound.new_cache(whole)))


def process_longer(inputs, ids):
    """The prompt's inputs with more text after it."""
    extra = ids.shape[1] - inputs["input_ids"].shape[1]
    padded = {
        key: torch.nn.functional.pad(value, (0, extra), value=int(key == "attention_mask"))
        for key, value in inputs.items()
        if key in ("attention_mask", "mm_token_type_ids")
    }
    return {**inputs, **padded, "input_ids": ids}


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}])
@pytest.mark.parametrize("name", NAMES)
def test_beams_and_several_answers_start_from_one_packed_video(name: str, options) -> None:
    """The packed rows are repeated for them, and reduced again for what comes next."""
    (model, _), inputs = loaded(name), asked(name)
    torch.manual_seed(3)
    want = generate(model, inputs, **options).sequences
    greedy = generate(model, inputs)
    with get_method(**EXACT).bind(model) as bound:
        cache = bound.encode(inputs)
        held = cache.nbytes().total
        torch.manual_seed(3)
        assert torch.equal(generate(model, bound.resume(cache, inputs), **options).sequences, want)
        assert cache.layers[0].stored.kept.k.shape[0] > 1
        with pytest.raises(UserError, match="take it back to one row a prompt with resume"):
            generate(model, ids_only(torch.cat([inputs["input_ids"], want[:1, -2:]], 1)), cache)
        assert close_steps(generate(model, bound.resume(cache, inputs)), greedy)
        assert cache.layers[0].stored.kept.k.shape[0] == 1
        assert cache.nbytes().total < 2 * held


def test_a_batch_of_conversations() -> None:
    """Two videos, encoded together with left padding, asked twice; another batch size in between."""
    for name in NAMES:
        model, processor = loaded(name)
        clips = [frames(8, seed) for seed in (1, 2)]

        def batch(*questions: str, name=name, processor=processor, clips=clips):
            starts = ("hello, user: {video}", "user: {video}")
            rows = zip(starts, questions, clips, strict=True)
            return process(name, processor, [Ask(start + question, videos=[clip]) for start, question, clip in rows])

        questions = [batch(WHAT, WHAT), batch(WHY, WHY)]
        assert not questions[0]["attention_mask"].all()
        want = [generate(model, inputs) for inputs in questions]
        with get_method(**EXACT).bind(model) as bound:
            cache = bound.encode(questions[0])
            for inputs, expected in zip(questions, want, strict=True):
                generate(model, asked(name, seed=9), max_new_tokens=2)
                assert close_steps(generate(model, bound.resume(cache, inputs)), expected)
            with pytest.raises(
                UserError, match=r"are padded on the left by \[\d+, 0\] tokens, those in the cache by \[0, "
            ):
                bound.resume(cache, batch(WHAT, WHY + WHAT + WHY))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_the_same_video_is_refused(name: str) -> None:
    (model, processor), inputs = loaded(name), asked(name)
    other = video_inputs(name, processor, seed=5)
    twice = process(name, processor, [Ask("user: {video}" + WHAT + "{video}", videos=[frames(8, 0), frames(8, 1)])])
    with get_method(**WINDOWQUANT).bind(model) as bound:
        cache = bound.encode(inputs)
        with pytest.raises(UserError, match="other images or videos"):
            bound.resume(cache, other)
        with pytest.raises(UserError, match="more images or videos than the cache"):
            bound.resume(cache, ids_only(twice["input_ids"]))
        with pytest.raises(
            UserError, match="differs from the one in the cache at token 0, before the end of its video"
        ):
            bound.resume(cache, ids_only(torch.cat([inputs["input_ids"][:, 1:], inputs["input_ids"][:, -1:]], 1)))
        with pytest.raises(UserError, match="holds 1 prompts and the inputs 2"):
            bound.resume(cache, ids_only(inputs["input_ids"].repeat(2, 1)))
        with pytest.raises(UserError, match="holds no video yet"):
            bound.resume(bound.new_cache(inputs), inputs)
        with pytest.raises(UserError, match="no image and no video to encode"):
            bound.encode(text_inputs(name, processor))
        end = int(cache.request.prompt.visual_end)
        cut = {k: v[:, :end] if v.shape[:2] == inputs["input_ids"].shape else v for k, v in inputs.items()}
        with pytest.raises(UserError, match="Nothing follows the video"):
            bound.encode(cut)
        assert generate(model, bound.resume(cache, inputs)).sequences.shape[1] > end, "and the cache is as it was"
    with pytest.raises(UserError, match="not bound to the model now"):
        bound.resume(cache, inputs)


def test_a_cache_that_keeps_no_video_apart_cannot_go_back() -> None:
    (model, _), inputs = loaded("llava_onevision"), asked("llava_onevision")
    with get_method("dynamic").bind(model) as bound, pytest.raises(UserError, match="DynamicCache does not store"):
        bound.resume(bound.encode(inputs), inputs)


@pytest.mark.parametrize("search", ["calibrated", "online"])
def test_encoding_with_sensitivities_of_either_kind(search: str) -> None:
    (model, _), inputs = loaded("qwen2_vl"), asked("qwen2_vl")
    sensitivity = "online" if search == "online" else (0.45, 0.6)
    with get_method("windowquant", window_size=8, sensitivity=sensitivity).bind(model) as bound:
        reply, _ = answer(bound, inputs, "context", 6)
        out = generate(model, bound.resume(bound.encode(inputs), inputs), max_new_tokens=6).sequences[0]
        assert out[inputs["input_ids"].shape[1] :].tolist() == reply.tokens
