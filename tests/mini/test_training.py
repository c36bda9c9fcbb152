"""The training sees what the evaluation asks, resumes exactly, and its masks and targets are right."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.mini.untrained import language_of, questions
from windowquant.errors import UserError
from windowquant.mini import scenes as sc
from windowquant.mini.architectures import ARCHITECTURES
from windowquant.mini.text_model import PER_FRAME
from windowquant.mini.training.language import Language
from windowquant.mini.training.loop import Stage, fit
from windowquant.mini.training.rows import IGNORE, counted, visible
from windowquant.mini.training.videos import Difficulty, Videos, open_question, training_questions
from windowquant.mini.training.vision import Vision


@pytest.fixture(params=list(ARCHITECTURES))
def language(request: pytest.FixtureRequest) -> Language:
    return language_of(request.param)


def test_hints_mark_the_last_token_of_each_option(language: Language) -> None:
    tokenizer = language.tokenizer
    for asked in questions(1)[:3]:
        ids, _, hints = language.segment(asked)
        marked = [(k, hint) for k, hint in enumerate(hints) if hint >= 0]
        assert [tokenizer.convert_ids_to_tokens(h) for _, h in marked] == [f"Ġ({c})" for c in sc.LETTERS]
        for (k, _), option in zip(marked, asked.question.options, strict=True):
            assert tokenizer.decode([ids[k]]).strip() == option.split()[-1]


def test_mask_and_positions_follow_the_parts() -> None:
    part = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, -1], [0, 0, 1, 1, 1, 1, 2, -1, -1]])
    mask, position = visible(part), counted(part)
    for b in range(2):
        common = int((part[b] == 0).sum())
        for q in range(part.shape[1]):
            for k in range(part.shape[1]):
                seen = k <= q and (part[b, k] == 0 or part[b, k] == part[b, q])
                assert bool(mask[b, q, k]) == seen
            if part[b, q] > 0:
                first = part[b].tolist().index(int(part[b, q]))
                assert position[b, q] == common + q - first


def test_batches_hint_at_the_place_of_the_scene_before(language: Language) -> None:
    videos = Videos(language, torch.randn(len(sc.PLACES), len(sc.CONTENTS), 2, PER_FRAME, 192))
    level, stride = Difficulty(24, (3, 4)), language.architecture.stride
    rows, visual = videos.batch(2, np.random.default_rng(0), level, training_questions(2, 1), 0.0)
    assert visual.shape == (2, 24 // stride * PER_FRAME, 192)
    rng = np.random.default_rng(0)
    rng.random()
    story = sc.sample_story(rng, level.scenes, level.frames)
    expected, frame = [IGNORE] * (24 * PER_FRAME), 0
    for before, length, following in zip(story.scenes, story.lengths, story.lengths[1:], strict=False):
        frame += length
        place = language.place_ids[sc.PLACES.index(before.place)]
        expected[frame * PER_FRAME : (frame + following) * PER_FRAME] = [int(place)] * PER_FRAME * following
    groups = [expected[k : k + PER_FRAME] for k in range(0, len(expected), PER_FRAME * stride)]
    columns = videos.layout(24).visual
    assert rows.hints[0, columns].tolist() == sum(groups, [])
    common = rows.hints[0, rows.part[0] == 0].tolist()
    assert all(hint == IGNORE for k, hint in enumerate(common) if k not in columns)


def test_a_group_of_frames_has_the_place_and_content_of_its_scene(language: Language) -> None:
    codes = torch.arange(len(sc.PLACES) * len(sc.CONTENTS)).view(len(sc.PLACES), len(sc.CONTENTS))
    videos = Videos(language, codes[:, :, None, None, None].expand(-1, -1, 3, PER_FRAME, 1))
    story = sc.sample_story(np.random.default_rng(4))
    tokens, _ = videos._tokens(story, np.random.default_rng(0))
    frames = language.architecture.frames // language.architecture.merged
    shown = [s for s, n in zip(story.scenes, story.lengths, strict=True) for _ in range(n * frames // sc.FRAMES)]
    assert tokens.flatten().tolist() == [
        int(codes[sc.PLACES.index(s.place), sc.CONTENTS.index(s.content)]) for s in shown for _ in range(PER_FRAME)
    ]


def test_visual_tokens_stand_in_their_columns(language: Language) -> None:
    videos = Videos(language, torch.zeros(len(sc.PLACES), len(sc.CONTENTS), 1, PER_FRAME, 192))
    layout, architecture = videos.layout(8), language.architecture
    words, visual = torch.randn(2, len(layout.ids) + 5, 192), torch.randn(2, len(layout.visual), 192)
    embedded = architecture.embed(language.model, words, visual, layout)
    assert torch.equal(embedded[:, layout.visual], visual)
    emitted = set(range(len(layout.ids))) - set(layout.visual)
    text = [k for k in emitted if layout.ids[k] != layout.ids[layout.visual[0]]]
    assert torch.equal(embedded[:, text], words[:, text]) and torch.equal(embedded[:, -5:], words[:, -5:])
    newline = sorted(emitted - set(text))  # LLaVA-OneVision's, a placeholder of its own
    for parameter in architecture.emitted(language.model).values():
        assert torch.equal(embedded[:, newline], parameter.expand(2, 1, -1))
    assert len(newline) == len(architecture.emitted(language.model))


def test_open_questions_are_answered_in_words() -> None:
    rng = np.random.default_rng(2)
    question = sc.ask_main(sc.sample_story(rng, main="run"), rng)
    asked = open_question(question)
    assert asked.question == replace(question, options=(), answer=-1, reply=question.options[question.answer])


def test_alignment_is_the_cross_entropy_of_cosines() -> None:
    language = language_of("llava_onevision")
    vision = Vision(language.architecture, language.model, language.tokenizer)
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


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    run_stage_in(tmp_path / "whole", 2)
    with pytest.raises(UserError, match="test.safetensors is of another model"):
        fit(Stage("test", 2, 0.1, seed=3), {"other": nn.Parameter(torch.zeros(3))}, None, dict, tmp_path / "whole")


def test_a_stage_without_steps_is_left_out(tmp_path: Path) -> None:
    fit(Stage("none", 0, 0.1, seed=0), {"weight": nn.Parameter(torch.zeros(3))}, None, dict, tmp_path)
    assert list(tmp_path.iterdir()) == []
