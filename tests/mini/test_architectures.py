"""Training rows are what the real processor and the real class make of a prompt."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.mini.untrained import language_of, questions
from windowquant.errors import UserError
from windowquant.mini import scenes as sc
from windowquant.mini.architectures import ARCHITECTURES, architecture
from windowquant.mini.render import Drawings, stills
from windowquant.mini.text_model import FAST_PAIRS, OFFSETS, PER_FRAME
from windowquant.mini.training.language import Language
from windowquant.mini.training.rows import counted

GROUPS = 5


@pytest.fixture(params=list(ARCHITECTURES))
def language(request: pytest.FixtureRequest) -> Language:
    return language_of(request.param)


def processed(language: Language, text: str, video: np.ndarray) -> dict[str, Any]:
    """What the real processor makes of one question about a video."""
    processor = language.architecture.build_processor(language.tokenizer)
    turn = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}
    prompt = processor.apply_chat_template([turn], add_generation_prompt=True)
    return dict(processor(text=[prompt], videos=[video], return_tensors="pt"))


def test_an_unknown_architecture_is_told() -> None:
    with pytest.raises(UserError, match="Unknown architecture 'gpt': .*llava_onevision, qwen2_vl, internvl"):
        architecture("gpt")


@pytest.mark.parametrize("seed", range(3))
def test_training_tokens_are_the_processors(language: Language, seed: int) -> None:
    video = np.zeros((GROUPS * language.architecture.merged, 64, 64, 3), np.uint8)
    for asked in questions(seed):
        expected = processed(language, sc.prompt(asked.question, asked.task), video)["input_ids"][0].tolist()
        ids, labels, _ = language.segment(asked)
        cut = next(k for k, label in enumerate(labels) if label >= 0)
        layout = language.architecture.layout(language.tokenizer, GROUPS)
        assert [*layout.ids, *ids[:cut]] == expected
        assert labels[cut:] == ids[cut:]
        assert language.tokenizer.decode(ids[cut:], skip_special_tokens=True).strip() == asked.question.reply


def placeholders(language: Language, ids: Tensor) -> list[int]:
    known = [getattr(language.model.config, f"{kind}_token_id", None) for kind in ("image", "video")]
    return [k for k, token in enumerate(ids.tolist()) if token in known]


def test_the_layout_names_the_columns_of_visual_tokens(language: Language) -> None:
    layout = language.architecture.layout(language.tokenizer, GROUPS)
    emitted = len(language.architecture.emitted(language.model))  # placeholders too, of what is no frame
    columns = placeholders(language, torch.tensor(layout.ids))
    assert layout.visual == columns[: len(columns) - emitted]
    assert len(layout.visual) == GROUPS * PER_FRAME and columns[-1] == len(layout.ids) - 1


def some_stills(language: Language) -> Tensor:
    """[GROUPS, merged, 3, 64, 64] uint8."""
    rng, merged = np.random.default_rng(0), language.architecture.merged
    places = zip(sc.PLACES, sc.CONTENTS[:GROUPS], strict=False)
    return torch.from_numpy(np.stack([stills(*place, Drawings(False), rng, merged) for place in places]))


@torch.no_grad()
def entering(language: Language, groups: Tensor) -> Tensor:
    """[GROUPS, 4, 192]: what enters the language model for a video of these frames, processed by the real processor."""
    seen = {}

    def record(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        seen["embeds"] = kwargs["inputs_embeds"][0]

    hook = language.lm.register_forward_pre_hook(record, with_kwargs=True)
    language.model(**processed(language, "why", groups.flatten(0, 1).permute(0, 2, 3, 1).numpy()))
    hook.remove()
    return seen["embeds"][language.architecture.layout(language.tokenizer, GROUPS).visual].unflatten(0, (GROUPS, -1))


@pytest.mark.parametrize("name", ["qwen2_vl", "internvl"])
def test_visual_tokens_of_the_training_are_the_classs_own(name: str) -> None:
    language = language_of(name)
    groups = some_stills(language)
    expected = language.architecture.frame_tokens(language.model, groups)
    assert torch.allclose(entering(language, groups), expected, atol=1e-5)


def test_llava_onevision_settles_where_class_and_training_agree() -> None:
    language = copy.deepcopy(language_of("llava_onevision"))
    kind, model, groups = language.architecture, language.model, some_stills(language)
    with torch.no_grad():  # as a training might leave them
        model.model.vision_tower.post_layernorm.weight.normal_(1, 0.2)
        model.model.vision_tower.post_layernorm.bias.normal_(0, 0.2)
    trained = kind.frame_tokens(model, groups)
    kind.settle(model, groups)
    assert torch.allclose(kind.frame_tokens(model, groups), trained, atol=1e-5)
    assert torch.cosine_similarity(entering(language, groups), trained, dim=-1).min() > 0.99


def test_a_whole_video_is_sampled_as_the_stride_says(language: Language) -> None:
    kind = language.architecture
    frames = kind.sampled(np.arange(sc.FRAMES))
    assert len(frames) == kind.frames
    first = frames[:: kind.merged]
    assert np.array_equal(first // kind.stride, np.arange(sc.FRAMES // kind.stride))
    assert sc.MIN_SCENE_FRAMES % kind.stride == 0  # a group never crosses a cut


def test_every_word_of_the_world_is_one_token(language: Language) -> None:
    tokenizer, base = language.tokenizer, language_of("llava_onevision").tokenizer
    for word in (*sc.PLACES, *sc.CONTENTS):
        assert tokenizer.encode(f" {word}") == base.encode(f" {word}") and len(tokenizer.encode(f" {word}")) == 1
    for letter in sc.LETTERS:
        assert len(tokenizer.tokenize(f"\n{letter}.")) == len(tokenizer.tokenize(f" ({letter})")) == 1


def test_the_tokenizer_falls_back_to_bytes(language: Language) -> None:
    text = "Ünïcode 42 \t\n kitten's"
    assert language.tokenizer.decode(language.tokenizer(text).input_ids) == text


def test_the_first_heads_start_at_their_distances(language: Language) -> None:
    attention = language.lm.layers[0].self_attn
    half, fast = 16, slice(FAST_PAIRS)
    frequency = 1e6 ** (-np.arange(half) / half)
    k = attention.k_proj.bias.detach().numpy()[:32]
    for head, offset in enumerate(OFFSETS):
        q = attention.q_proj.bias.detach().numpy()[32 * head : 32 * head + 32]
        scores = []
        for distance in range(10):
            turned = np.exp(1j * frequency * distance) * (q[:half] + 1j * q[half:])
            scores.append(float((turned[fast] * np.conj(k[:half] + 1j * k[half:])[fast]).real.sum()))
        assert int(np.argmax(scores)) == offset


# ---- Qwen2-VL's positions


def test_positions_of_qwen2_vl_are_those_that_generate_uses() -> None:
    language = language_of("qwen2_vl")
    layout = language.architecture.layout(language.tokenizer, GROUPS)
    segments = [language.segment(asked)[0] for asked in (questions(0)[0], questions(1)[3])]
    part = torch.tensor([[0] * len(layout.ids) + [k + 1 for k, ids in enumerate(segments) for _ in ids]])
    positions = language.architecture.positions(counted(part), part, layout)[:, 0]
    seen: list[Tensor] = []

    def record(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"][-3:, 0])

    hook = language.lm.register_forward_pre_hook(record, with_kwargs=True)
    grid = {"video_grid_thw": torch.tensor([[GROUPS, 4, 4]]), "pixel_values_videos": torch.zeros(GROUPS * 16, 1536)}
    for k, segment in enumerate(segments, start=1):
        ids = torch.tensor([[*layout.ids, *segment[:-6]]])  # the reply's last tokens are written by generate
        types = 2 * (ids == language.model.config.video_token_id).int()
        seen.clear()
        language.model.generate(
            ids, mm_token_type_ids=types, **grid, max_new_tokens=7, min_new_tokens=7, do_sample=False
        )
        used = torch.cat(seen, 1)
        assert torch.equal(used[:, : len(layout.ids)], positions[:, part[0] == 0])
        assert torch.equal(used[:, len(layout.ids) :], positions[:, part[0] == k])
    hook.remove()
