"""The training sees what the evaluation asks, resumes exactly, and its masks and targets are right."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from windowquant.mini import scenes as sc
from windowquant.mini.build import OFFSETS, PER_FRAME, build_model, build_processor, build_tokenizer
from windowquant.mini.training import language as lang
from windowquant.mini.training.loop import Stage, fit
from windowquant.mini.training.vision import Vision


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return build_model(tokenizer, seed=0)


@pytest.fixture(scope="module")
def language(model, tokenizer):
    return lang.Language(model, tokenizer)


def questions(seed: int) -> list[lang.Asked]:
    rng = np.random.default_rng(seed)
    story, main = sc.sample_story(rng), sc.sample_story(rng, main="wave")
    out = [lang.Asked(sc.ask(sc.NEXTQA_MIX, story, rng), "nextqa"), lang.Asked(sc.ask_main(main, rng), "egoschema")]
    return [
        *out,
        lang.Asked(sc.ask(sc.INTENTQA_MIX, story, rng), "intentqa"),
        lang.Asked(sc.describe(story), "describe"),
    ]


@pytest.mark.parametrize("seed", range(5))
def test_training_tokens_are_the_processors(language, tokenizer, seed):
    processor = build_processor(tokenizer)
    video = np.zeros((2, 64, 64, 3), np.uint8)
    for asked in questions(seed):
        content = [{"type": "video"}, {"type": "text", "text": sc.prompt(asked.question, asked.task)}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        expected = processor(text=[prompt], videos=[video], return_tensors="pt").input_ids[0].tolist()
        ids, labels, _ = language.segment(asked)
        cut = next(k for k, label in enumerate(labels) if label >= 0)
        slots = [language.model.config.video_token_id] * (2 * PER_FRAME + 1)
        assert [*language.prefix, *slots, *ids[:cut]] == expected
        assert labels[cut:] == ids[cut:]
        assert tokenizer.decode(ids[cut:], skip_special_tokens=True).strip() == asked.question.reply


def test_every_word_of_the_world_is_one_token(tokenizer):
    for word in (*sc.PLACES, *sc.CONTENTS):
        assert len(tokenizer.tokenize(f" {word}")) == 1
    for letter in sc.LETTERS:
        assert len(tokenizer.tokenize(f"\n{letter}.")) == len(tokenizer.tokenize(f" ({letter})")) == 1


def test_the_tokenizer_falls_back_to_bytes(tokenizer):
    text = "Ünïcode 42 \t\n kitten's"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_hints_mark_the_last_token_of_each_option(language, tokenizer):
    for asked in questions(1)[:3]:
        ids, _, hints = language.segment(asked)
        marked = [(k, hint) for k, hint in enumerate(hints) if hint >= 0]
        assert [tokenizer.convert_ids_to_tokens(h) for _, h in marked] == [f"Ġ({c})" for c in sc.LETTERS]
        for (k, _), option in zip(marked, asked.question.options, strict=True):
            assert tokenizer.decode([ids[k]]).strip() == option.split()[-1]


def test_mask_and_positions_follow_the_parts():
    part = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, -1], [0, 0, 1, 1, 1, 1, 2, -1, -1]])
    mask, position = lang._mask_and_positions(part)
    for b in range(2):
        common = int((part[b] == 0).sum())
        for q in range(part.shape[1]):
            for k in range(part.shape[1]):
                visible = k <= q and (part[b, k] == 0 or part[b, k] == part[b, q])
                assert bool(mask[b, q, k]) == visible
            if part[b, q] > 0:
                first = part[b].tolist().index(int(part[b, q]))
                assert position[b, q] == common + q - first


def test_batches_hint_at_the_place_of_the_scene_before(language, model):
    bank = torch.randn(len(sc.PLACES), len(sc.CONTENTS), 2, PER_FRAME, 192)
    videos = lang.Videos(language, bank)
    level = lang.Difficulty(24, (3, 4))
    rows, visual = videos.batch(2, np.random.default_rng(0), level, lang.training_questions(2, 1), 0.0)
    assert visual.shape == (2, 24 * PER_FRAME, 192)
    rng = np.random.default_rng(0)
    rng.random()
    story = sc.sample_story(rng, level.scenes, level.frames)
    start, expected = len(language.prefix), [lang.IGNORE] * (24 * PER_FRAME)
    frame = 0
    for before, length, following in zip(story.scenes, story.lengths, story.lengths[1:], strict=False):
        frame += length
        place = language.place_ids[sc.PLACES.index(before.place)]
        expected[frame * PER_FRAME : (frame + following) * PER_FRAME] = [int(place)] * PER_FRAME * following
    assert rows.hints[0, start : start + 24 * PER_FRAME].tolist() == expected


def test_open_questions_are_answered_in_words():
    rng = np.random.default_rng(2)
    question = sc.ask_main(sc.sample_story(rng, main="run"), rng)
    asked = lang._open(question)
    assert asked.question == replace(question, options=(), answer=-1, reply=question.options[question.answer])


def test_the_first_heads_start_at_their_distances(model):
    attention = model.model.language_model.layers[0].self_attn
    half = 16
    frequency = 1e6 ** (-np.arange(half) / half)
    k = attention.k_proj.bias.detach().numpy()[:32]
    for head, offset in enumerate(OFFSETS):
        q = attention.q_proj.bias.detach().numpy()[32 * head : 32 * head + 32]
        scores = []
        for distance in range(10):
            turned = np.exp(1j * frequency * distance) * (q[:half] + 1j * q[half:])
            scores.append(float((turned[:5] * np.conj(k[:half] + 1j * k[half:])[:5]).real.sum()))
        assert int(np.argmax(scores)) == offset


def test_alignment_is_the_cross_entropy_of_cosines(model, tokenizer):
    vision = Vision(model, tokenizer)
    z = torch.randn(3, PER_FRAME, 192)
    place, content = torch.tensor([0, 5, 9]), torch.tensor([1, 20, 3])
    loss, _, _ = vision.alignment(z, place, content)
    table = vision.embed.weight.detach().double().numpy()
    total = 0.0
    for target, ids in ((place, vision.place_ids), (content, vision.content_ids)):
        words = table[ids.numpy()]
        words = words / np.linalg.norm(words, axis=1, keepdims=True)
        each = []
        for n in range(3):
            vectors = [*z[n].double().numpy(), z[n].double().numpy().mean(0)]
            for weight, vector in zip([0.5 / PER_FRAME] * PER_FRAME + [0.5], vectors, strict=True):
                logits = words @ (vector / np.linalg.norm(vector)) / 0.07
                each.append(weight * (np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[target[n]]))
        total += sum(each) / 3
    assert loss.item() == pytest.approx(total, rel=1e-4)


def run_stage(folder, steps: int, stop_after: int | None = None) -> torch.Tensor:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(3))
    unused = nn.Parameter(torch.ones(2))
    seen = 0

    def loss(_: float, rng: np.random.Generator) -> torch.Tensor:
        nonlocal seen
        seen += 1
        if stop_after is not None and seen > stop_after:
            raise KeyboardInterrupt
        return (weight - torch.from_numpy(rng.normal(size=3)).float()).square().sum() + torch.rand(()) * weight.sum()

    stage = Stage("test", steps, 0.1, seed=3, report_every=4, save_every=2)
    fit(stage, {"weight": weight, "unused": unused}, loss, lambda: {"w": weight[0].item()}, folder)
    return weight.detach()


def test_an_interrupted_stage_ends_where_an_unbroken_one_does(tmp_path):
    whole = run_stage_in(tmp_path / "whole", 9)
    with pytest.raises(KeyboardInterrupt):
        run_stage_in(tmp_path / "broken", 9, stop_after=5)
    assert torch.equal(run_stage_in(tmp_path / "broken", 9), whole)
    assert torch.equal(run_stage_in(tmp_path / "broken", 9), whole)  # finished: loaded, not run
    assert torch.equal(load_file(tmp_path / "whole" / "test.safetensors")["param.weight"], whole)


def run_stage_in(folder, steps, stop_after=None):
    folder.mkdir(exist_ok=True)
    return run_stage(folder, steps, stop_after)
