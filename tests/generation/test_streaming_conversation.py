"""Several questions about one video in a streaming cache, which comes back to the video's end only."""

from pathlib import Path

import pytest
import torch

from tests.architectures import Ask, frames, process
from tests.generation.common import NAMES, WHAT, WHY, asked, generate, loaded, same_steps
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.protocols import Session, answer

KIVI = {"name": "kivi", "group": 8, "residual": 16}


def ids_only(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def two_videos(name: str, question: str) -> tuple[dict, list[dict]]:
    """Two prompts of different length with a video each, left-padded, and each of them alone."""
    starts = ("hello, user: {video}", "user: {video}")
    asks = [Ask(start + question, videos=[frames(8, seed)]) for seed, start in enumerate(starts, start=1)]
    return process(name, loaded(name)[1], asks), [process(name, loaded(name)[1], [ask]) for ask in asks]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_in_turns(name: str) -> None:
    """The turns so far are run again from the video's end: as one long question about it."""
    (model, _), inputs = loaded(name), asked(name)
    more = asked(name, WHY)["input_ids"][:, -len(WHY) :]
    with get_method(**KIVI).bind(model) as bound:
        cache = bound.encode(inputs)
        ids = inputs["input_ids"]
        for _ in range(3):
            out = generate(model, bound.resume(cache, ids_only(ids)), max_new_tokens=12)
            fresh = generate(model, bound.resume(bound.encode(inputs), ids_only(ids)), max_new_tokens=12)
            assert same_steps(out, fresh)
            ids = torch.cat([out.sequences, more], 1)


@pytest.mark.parametrize("name", NAMES)
def test_beams_and_several_answers_start_from_one_encoded_video(name: str) -> None:
    """The stored rows are repeated for them, and reduced again for what comes next."""
    (model, _), inputs = loaded(name), asked(name)
    with get_method(**KIVI).bind(model) as bound:
        cache = bound.encode(inputs)
        greedy = generate(model, bound.resume(cache, inputs), max_new_tokens=20)
        best = generate(
            model, bound.resume(cache, inputs), num_beams=3, length_penalty=0.0, output_scores=True, max_new_tokens=20
        )
        tokens = best.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logits = Session(bound, inputs, "context").logits(tokens).log_softmax(-1)
        score = float(logits[torch.arange(len(tokens)), tokens].sum())
        assert float(best.sequences_scores[0]) == pytest.approx(score, abs=5e-3)
        assert cache.layers[0].rows() == 3
        with pytest.raises(UserError, match="take it back to one row a prompt with resume"):
            generate(model, ids_only(torch.cat([inputs["input_ids"], best.sequences[:1, -2:]], 1)), cache)
        torch.manual_seed(1)
        several = generate(model, bound.resume(cache, inputs), num_return_sequences=2, do_sample=True)
        assert len(several.sequences) == 2 and cache.layers[0].rows() == 2
        assert same_steps(generate(model, bound.resume(cache, inputs), max_new_tokens=20), greedy)
        assert cache.layers[0].rows() == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_conversations(name: str, tmp_path: Path) -> None:
    """Two videos, encoded together with left padding, asked twice: each row as alone; and from a file."""
    model, _ = loaded(name)
    with get_method(**KIVI).bind(model) as bound:
        cache = bound.encode(two_videos(name, WHAT)[0])
        for question in (WHAT, WHY):
            batch, alone = two_videos(name, question)
            assert not batch["attention_mask"].all()
            generate(model, bound.resume(cache, batch), num_beams=2)
            out = generate(model, bound.resume(cache, batch))
            for row, inputs in enumerate(alone):
                reply, _ = answer(bound, inputs, "context", 8)
                assert out.sequences[row, batch["input_ids"].shape[1] :].tolist() == reply.tokens
            cache.save(tmp_path / "talk.st")
            copy = bound.load_cache(tmp_path / "talk.st", batch)
            assert same_steps(generate(model, bound.resume(copy, batch)), out)


def test_rows_that_changed_places_are_put_back_and_lost_ones_are_missed() -> None:
    (model, _), name = loaded("qwen2_vl"), "qwen2_vl"
    batch, _ = two_videos(name, WHAT)
    with get_method(**KIVI).bind(model) as bound:
        cache = bound.encode(batch)
        want = generate(model, bound.resume(cache, batch))
        cache.batch_select_indices(torch.tensor([1, 0]))
        assert same_steps(generate(model, bound.resume(cache, batch)), want)
        cache.batch_select_indices(torch.tensor([1, 1]))
        with pytest.raises(UserError, match="lost a row of the prompt"):
            bound.resume(cache, batch)


def test_the_way_back_takes_an_exact_window_at_most() -> None:
    """And nothing where nobody asked for it."""
    (model, _), inputs = loaded("qwen2_vl"), asked("qwen2_vl")
    with get_method(**KIVI).bind(model) as bound:
        plain, kept = bound.new_cache(inputs), bound.encode(inputs)
        video = kept.get_seq_length()
        generate(model, inputs, plain, max_new_tokens=60)
        generate(model, bound.resume(kept, inputs), max_new_tokens=60)
        assert (plain.nbytes().codes, plain.nbytes().scale_zero) == (kept.nbytes().codes, kept.nbytes().scale_zero)
        beside = kept.predicted_nbytes() - plain.predicted_nbytes()
        tokens = video % 16 + min(video, 16)  # exact at the video's end: of K and of V
        text = model.config.get_text_config()
        assert beside == 2 * text.num_hidden_layers * tokens * text.num_key_value_heads * 8 > 0
        shares = [kept.visual_bits(), plain.visual_bits()]
        assert shares[0] > shares[1] and kept.stats.bits == plain.stats.bits


def test_what_cannot_be_taken_back_is_refused() -> None:
    model, processor = loaded("llava_onevision")
    asks = [Ask("user: {video}" + WHY, videos=[frames(8, 0)]), Ask("hi")]
    inputs, batch = asked("llava_onevision"), process("llava_onevision", processor, asks)
    with get_method(**KIVI).bind(model) as bound:
        cache = bound.new_cache(inputs)
        with pytest.raises(UserError, match="holds no video yet"):
            bound.resume(cache, inputs)
        with pytest.raises(UserError, match="run the prefill first"):
            cache.save("nowhere.st")
        generate(model, inputs, cache)
        with pytest.raises(
            UserError, match=r"its state at the video's end was not kept; make it with encode\(inputs\)"
        ):
            bound.resume(cache, inputs)
        with pytest.raises(UserError, match="no image and no video, and begins after the end of the others"):
            bound.encode(batch)
        with pytest.raises(UserError, match="other images or videos"):
            bound.resume(bound.encode(inputs), asked("llava_onevision", seed=5))
