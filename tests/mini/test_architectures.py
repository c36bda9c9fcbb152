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
from windowquant.mini.training.rows import IGNORE, counted

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


class Always:
    """A generator whose draws are all the same."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def qwen_rows(in_one_call: bool) -> tuple[Language, list[list[int]], Tensor, Tensor]:
    """-> language, the whole token row of each of two questions alone (video, question, reply), the part of each token
    of the two in one row, and the row's positions [3, T]."""
    language = language_of("qwen2_vl")
    layout = language.architecture.layout(language.tokenizer, GROUPS)
    segments = [language.segment(asked) for asked in (questions(0)[0], questions(1)[3])]
    part = torch.tensor([[0] * len(layout.ids) + [k + 1 for k, (ids, _, _) in enumerate(segments) for _ in ids]])
    labels = torch.tensor([[IGNORE] * len(layout.ids) + sum((labels for _, labels, _ in segments), [])])
    draws: Any = Always(0.0 if in_one_call else 1.0)
    positions = language.architecture.positions(counted(part), part, labels >= 0, layout, draws)
    return language, [[*layout.ids, *ids] for ids, _, _ in segments], part[0], positions[:, 0]


def reply_start(language: Language, ids: list[int]) -> int:
    turn = language.encode("assistant\n")
    return next(k + len(turn) for k in range(len(ids)) if ids[k : k + len(turn)] == turn)


def real_positions(language: Language, ids: list[int], first: int) -> Tensor:
    """[3, T] of the real class: the first `first` tokens in one call, the others one by one from its cache."""
    model, whole = language.model.model, torch.tensor([ids])
    side = {"video_grid_thw": torch.tensor([[GROUPS, 4, 4]])}
    types = 2 * (whole == language.model.config.video_token_id).int()
    start, deltas = model.get_rope_index(whole[:, :first], mm_token_type_ids=types[:, :first], **side)
    later = torch.arange(first, len(ids)) + deltas
    return torch.cat([start[:, 0], later.expand(3, -1)], 1)


@pytest.mark.parametrize("in_one_call", [True, False])
def test_positions_of_qwen2_vl_are_the_real_classs(in_one_call: bool) -> None:
    language, rows, part, positions = qwen_rows(in_one_call)
    common = int((part == 0).sum())
    for k, ids in enumerate(rows, start=1):
        first = reply_start(language, ids) if in_one_call else common
        expected = real_positions(language, ids, first)
        assert torch.equal(positions[:, part == 0], expected[:, :common])
        assert torch.equal(positions[:, part == k], expected[:, common:])


def test_the_real_model_runs_on_from_its_cache_at_these_positions() -> None:
    """Next to `real_positions`: the offset that the class itself adds after a first call."""
    language, rows, part, positions = qwen_rows(in_one_call=False)
    video = np.zeros((GROUPS * 2, 64, 64, 3), np.uint8)
    inputs = processed(language, "why", video)
    common, seen = int((part == 0).sum()), []

    def record(_: Any, __: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"])

    hook = language.lm.register_forward_pre_hook(record, with_kwargs=True)
    first = {k: v[:, :common] if v.shape[:2] == inputs["input_ids"].shape else v for k, v in inputs.items()}
    del first["attention_mask"]
    with torch.no_grad():
        out = language.model(**first, use_cache=True)
        cache = out["cache" if "cache" in out else "past_key_values"]
        key = "cache" if "cache" in out else "past_key_values"
        language.model(input_ids=torch.tensor([rows[0][common:]]), use_cache=True, **{key: cache})
    hook.remove()
    assert torch.equal(seen[0][:, 0], positions[:, part == 0])
    assert torch.equal(seen[1][:, 0], positions[:, part == 1])
