"""Every architecture, as its real class with its real processor: what a method may not change, and what it must do."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import architectures as archs
from tests.architectures import ARCHITECTURES, FRAMES, LAYERS
from windowquant import WindowQuant
from windowquant.cache.packed_cache import PackedCache
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.models import adapter_for
from windowquant.prefill import first_columns
from windowquant.protocols import answer

MAKERS: dict[str, Callable[..., dict[str, Any]]] = {
    "video": archs.video_inputs,
    "image": archs.image_inputs,
    "images": archs.multi_image_inputs,
    "videos": archs.multi_video_inputs,
}
EXACT = {"name": "fp16", "kv_dtype": "model"}
NEW = 6

built = cache(archs.build)
every = pytest.mark.parametrize("name", ARCHITECTURES)
every_kind = pytest.mark.parametrize("kind", MAKERS)


def made(name: str, kind: str, seed: int = 0) -> tuple[Any, dict[str, Any]]:
    model, processor = built(name)
    return model, MAKERS[kind](name, processor, seed)


def generate(model: Any, inputs: dict[str, Any], **cache: Any) -> list[list[int]]:
    return model.generate(**inputs, **cache, max_new_tokens=NEW, do_sample=False)[
        :, inputs["input_ids"].shape[1] :
    ].tolist()


def generate_with(method: dict[str, Any], model: Any, inputs: dict[str, Any]) -> tuple[list[list[int]], PackedCache]:
    with get_method(**method).bind(model) as bound:
        held = bound.new_cache(inputs)
        return generate(model, inputs, **{bound.cache_keyword: held}), held


@every
@every_kind
def test_without_quantization_the_tokens_are_those_of_generate(name: str, kind: str) -> None:
    model, inputs = made(name, kind)
    assert generate_with(EXACT, model, inputs)[0] == generate(model, inputs)


@every
@every_kind
@pytest.mark.parametrize("sensitivity", ["online", (0.8,) * LAYERS], ids=["online", "given"])
def test_windowquant_packs_what_it_plans(name: str, kind: str, sensitivity: Any) -> None:
    model, inputs = made(name, kind)
    tokens, held = generate_with(
        {"name": "windowquant", "window_size": 4, "alpha": 0.5, "sensitivity": sensitivity}, model, inputs
    )
    assert held.packed and len(tokens[0]) == NEW
    assert min(held.stats.bits) < 16 and sum(held.stats.bits.values()) == pytest.approx(1)
    assert held.nbytes().codes > 0
    assert held.nbytes().total - held.nbytes().slack == held.predicted_nbytes()


@every
@pytest.mark.parametrize("method", [EXACT, {"name": "uniform_int4", "window_size": 4}], ids=["fp16", "int4"])
def test_each_row_of_a_padded_batch_gets_what_it_gets_alone(name: str, method: dict[str, Any]) -> None:
    model, processor = built(name)
    batch, alone = archs.batch_inputs(name, processor)
    lengths = batch["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == 3 and batch["attention_mask"][:, -1].all()
    with pytest.warns(UserWarning, match="no visual tokens"):
        rows = [generate_with(method, model, inputs)[0][0] for inputs in alone]
    assert generate_with(method, model, batch)[0] == rows


@every
def test_windowquant_on_a_padded_batch(name: str) -> None:
    model, processor = built(name)
    batch, _ = archs.batch_inputs(name, processor)
    tokens, held = generate_with({"name": "windowquant", "window_size": 4, "sensitivity": "online"}, model, batch)
    assert held.packed and [len(row) for row in tokens] == [NEW] * 3
    assert min(held.stats.bits) < 16


@every
def test_a_prompt_of_text_only_works_and_says_that_nothing_is_quantized(name: str) -> None:
    model, processor = built(name)
    generate(model, archs.video_inputs(name, processor))  # leaves Qwen models with the offset of a video
    inputs = archs.text_inputs(name, processor)
    method = {"name": "windowquant", "sensitivity": "online", "kv_dtype": "model"}
    with pytest.warns(UserWarning, match="no visual tokens, so nothing is quantized") as caught:
        tokens, held = generate_with(method, model, inputs)
    assert len(caught) == 1 and held.stats.bits == {}
    assert tokens == generate(model, inputs)


@every
def test_the_three_lines_of_the_readme(name: str) -> None:
    model, processor = built(name)
    inputs = archs.video_inputs(name, processor)
    with WindowQuant(alpha=2.0, sensitivity="online").bind(model, processor) as wq:
        output = model.generate(**inputs, cache=wq.new_cache(inputs), max_new_tokens=NEW)
    assert output.shape == (1, inputs["input_ids"].shape[1] + NEW)


def test_a_mistral_with_a_sliding_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = built("llava_next")
    monkeypatch.setattr(model.config.text_config, "sliding_window", 8)
    with pytest.raises(UserError, match="sliding-window attention layers is not supported"):
        get_method("fp16").bind(model)


def hooks(model: Any) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@every
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_model_is_as_it_was_afterwards(name: str, implementation: str) -> None:
    model, inputs = made(name, "video")
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        before, count, config = model(**inputs).logits, hooks(model), model.config.to_dict()
        attention = {
            n: getattr(m.config, "_attn_implementation", None) for n, m in model.named_modules() if hasattr(m, "config")
        }
        generate_with({"name": "windowquant", "window_size": 4, "sensitivity": "online"}, model, inputs)
        assert torch.equal(model(**inputs).logits, before)
    assert hooks(model) == count and model.config.to_dict() == config
    assert attention == {
        n: getattr(m.config, "_attn_implementation", None) for n, m in model.named_modules() if hasattr(m, "config")
    }
    model.set_attn_implementation("sdpa")


@every
@every_kind
@pytest.mark.parametrize("protocol", ["context", "cached", "paper"])
def test_protocols_give_the_tokens_of_one_call_whatever_ran_in_between(name: str, kind: str, protocol: Any) -> None:
    model, inputs = made(name, kind)
    want = generate(model, inputs)[0]
    other = archs.multi_video_inputs(name, built(name)[1], seed=5)
    with get_method(**EXACT).bind(model) as bound:
        reply, session = answer(bound, inputs, protocol, NEW)
        assert reply.tokens == want
        answer(bound, other, protocol, 2)
        assert session.logits(want).argmax(-1).tolist() == want
    with get_method("dynamic").bind(model) as bound:
        assert answer(bound, inputs, protocol, NEW)[0].tokens == want


@every
def test_generate_goes_on_from_a_prefix_whatever_ran_in_between(name: str) -> None:
    model, inputs = made(name, "video")
    want, text = generate(model, inputs), {key: inputs[key] for key in ("input_ids", "attention_mask")}
    with get_method(**EXACT).bind(model) as bound, torch.no_grad():
        held = bound.new_cache(inputs)
        end = bound.adapter.prompt(model, inputs).visual_end
        model(**first_columns(bound.adapter, model, inputs, end), **{bound.cache_keyword: held})
        generate(model, archs.multi_video_inputs(name, built(name)[1], seed=5))
        assert generate(model, text, **{bound.cache_keyword: held}) == want


@every
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_beams_and_samples_of_a_padded_batch(name: str, options: dict[str, Any]) -> None:
    model, processor = built(name)
    batch, _ = archs.batch_inputs(name, processor)
    torch.manual_seed(0)
    want = model.generate(**batch, max_new_tokens=NEW, **options)
    with get_method(**EXACT).bind(model) as bound:
        torch.manual_seed(0)
        have = model.generate(**batch, **{bound.cache_keyword: bound.new_cache(batch)}, max_new_tokens=NEW, **options)
    assert torch.equal(have, want)


@every
@every_kind
def test_recorded_features_equal_the_vision_tower(name: str, kind: str) -> None:
    model, inputs = made(name, kind)
    for method in ({"name": "uniform_int2", "window_size": 4}, {"name": "dynamic"}):
        with get_method(**method).bind(model) as bound:
            spared = {key: value for key, value in inputs.items() if key not in bound.adapter.pixel_keys}
            spared["visual_features"] = bound.visual_features(inputs)
            reply, session = answer(bound, inputs, "context", NEW)
            again, second = answer(bound, spared, "context", NEW)
            assert again.tokens == reply.tokens
            assert torch.equal(second.logits(reply.tokens), session.logits(reply.tokens))


def test_recorded_features_of_qwen3_vl_hold_the_deeper_layers() -> None:
    model, inputs = made("qwen3_vl", "video")
    with get_method("fp16").bind(model) as bound:
        features = bound.visual_features(inputs)
    (deeper,) = features.deeper
    assert deeper.shape == features.tokens.shape == (FRAMES // 2 * 6, 48)
    assert features.nbytes == 2 * features.tokens.nbytes


def seen_positions(model: Any, inputs: dict[str, Any]) -> list[Tensor]:
    """Rotary positions [3, B, t] that the language model gets in each step of a plain generate."""
    seen: list[Tensor] = []

    def look(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["position_ids"][-3:])

    hook = adapter_for(model).language_model(model).register_forward_pre_hook(look, with_kwargs=True)
    generate(model, inputs)
    hook.remove()
    return seen


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("kind", [*MAKERS, "batch", "text"])
def test_positions_are_those_that_generate_gives(name: str, kind: str) -> None:
    model, processor = built(name)
    inputs = {
        "batch": lambda: archs.batch_inputs(name, processor)[0],
        "text": lambda: archs.text_inputs(name, processor),
        **{key: (lambda maker=maker: maker(name, processor)) for key, maker in MAKERS.items()},
    }[kind]()
    prompt, at = adapter_for(model).prompt(model, inputs), 0
    attended = inputs["attention_mask"].bool()
    for step in seen_positions(model, inputs):
        have = prompt.position_ids(at, at + step.shape[-1])
        mask = attended if at == 0 else torch.ones(step.shape[1:], dtype=torch.bool)
        assert have is not None and torch.equal(have[:, mask], step[:, mask])
        at += step.shape[-1]
    assert at == prompt.length + NEW - 1
    twice = prompt.repeat(2).position_ids(0, at)
    assert torch.equal(twice, prompt.position_ids(0, at, times=2))


PICTURES = {
    # tokens of each frame or image of: a video, three images of 16x16, 32x16 and 16x32 of which the last two touch
    "llava_onevision": ([4] * 7 + [5], None),
    "qwen2_vl": ([6] * 4, [4, 8, 8]),
    "qwen2_5_vl": ([6] * 4, [4, 8, 8]),
    "qwen3_vl": ([6] * 4, [4, 8, 8]),
    "internvl": ([4] * 8, [4, 12, 12]),
    "llava": ([16] * 8, [16, 16, 16]),
    "llava_next": (None, None),
}


@every
@pytest.mark.parametrize("kind", [0, 1], ids=["video", "images"])
def test_pictures_are_the_frames_and_images(name: str, kind: int) -> None:
    model, inputs = made(name, ("video", "images")[kind])
    adapter = adapter_for(model)
    (row,) = adapter.pictures(model, inputs)
    columns = torch.cat([picture.columns for picture in row])
    assert columns.tolist() == adapter.prompt(model, inputs).visual_positions[0].tolist()
    expected = PICTURES[name][kind]
    if expected is not None:
        assert [len(picture.columns) for picture in row] == expected
    says_video = kind == 0 and archs.PLACEHOLDERS[name][1] is not None and name != "internvl"
    assert {picture.kind for picture in row} == {"video" if says_video else "image"}
