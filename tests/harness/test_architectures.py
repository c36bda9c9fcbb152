"""A video file and images, through each architecture's own processor, loaded from a folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from tests.architectures import ARCHITECTURES, build
from tests.tiny import write_video
from windowquant.errors import UserError
from windowquant.harness import conversation
from windowquant.harness.command import CONF
from windowquant.harness.engine import Engine
from windowquant.harness.lmms_model import WindowQuantModel
from windowquant.harness.loading import Loaded, load
from windowquant.harness.settings import ModelSettings, group_settings
from windowquant.harness.video import sample_video
from windowquant.method import get_method

CPU, FRAMES = torch.device("cpu"), 6
Save = Callable[..., ModelSettings]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Settings of an architecture's tiny model, saved once."""
    root = tmp_path_factory.mktemp("architectures")

    def settings(name: str, **changes: Any) -> ModelSettings:
        if not (root / name).is_dir():
            model, processor = build(name)
            model.save_pretrained(root / name)
            processor.save_pretrained(root / name)
        return ModelSettings(**{"name": name, "pretrained": str(root / name), "frames": FRAMES, **changes})

    return settings


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_video(tmp_path_factory.mktemp("clips") / "clip.mp4", frames=20, side=32))


def ask(*media: tuple[str, Any], text: str = "why?") -> list[dict]:
    content = [{"type": kind, "url": source} for kind, source in media]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def generated(loaded: Loaded, inputs: Any, new: int) -> list[int]:
    return loaded.model.generate(**inputs, max_new_tokens=new, do_sample=False)[
        0, inputs["input_ids"].shape[1] :
    ].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_video_is_answered_as_by_generate(name: str, saved: Save, video: str) -> None:
    loaded = load(saved(name), CPU)
    with get_method("fp16", kv_dtype="model").bind(loaded.model) as bound:
        engine = Engine(loaded, bound, "context")
        asked = ask(("video", video))
        answer, again = (engine.answer(asked, {"max_new_tokens": 4}) for _ in range(2))
        inputs = engine.processed(asked)
        assert bound.adapter.prompt(loaded.model, inputs).visual_end > 0
    assert answer.reply.tokens == again.reply.tokens == generated(loaded, inputs, 4)
    assert loaded.processor.tokenizer.decode(inputs["input_ids"][0]).endswith("why?\nassistant: ")


FRAMES_IN: dict[str, Callable[[Any], int]] = {
    "llava_onevision": lambda inputs: inputs["pixel_values_videos"].shape[1],
    "qwen2_vl": lambda inputs: 2 * int(inputs["video_grid_thw"][0, 0]),
    "qwen2_5_vl": lambda inputs: 2 * int(inputs["video_grid_thw"][0, 0]),
    "qwen3_vl": lambda inputs: 2 * int(inputs["video_grid_thw"][0, 0]),
    "internvl": lambda inputs: len(inputs["pixel_values"]),
    "llava": lambda inputs: len(inputs["pixel_values"]),
    "llava_next": lambda inputs: len(inputs["pixel_values"]),
}


@pytest.mark.parametrize("frames", [2, 6])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_exactly_the_configured_frames_enter(name: str, frames: int, saved: Save, video: str) -> None:
    loaded = load(saved(name, frames=frames), CPU)
    with get_method("fp16").bind(loaded.model) as bound:
        inputs = Engine(loaded, bound, "context").processed(ask(("video", video)))
    assert FRAMES_IN[name](inputs) == frames


def test_frames_carry_their_times(saved: Save, video: str) -> None:
    """20 frames at 8 a second, 6 of them taken: positions 1, 5, 8, 11, 15, 18, merged in pairs."""
    _, where = sample_video(video, FRAMES)
    assert where == {"total_num_frames": 20, "fps": 8.0, "frames_indices": [1, 5, 8, 11, 15, 18]}
    loaded = load(saved("qwen3_vl"), CPU)
    with get_method("fp16").bind(loaded.model) as bound:
        inputs = Engine(loaded, bound, "context").processed(ask(("video", video)))
    text = loaded.processor.tokenizer.decode(inputs["input_ids"][0])
    assert [f"<{np.mean(pair) / 8:.1f} seconds>" in text for pair in ((1, 5), (8, 11), (15, 18))] == [True] * 3
    loaded = load(saved("qwen2_5_vl"), CPU)
    with get_method("fp16").bind(loaded.model) as bound:
        inputs = Engine(loaded, bound, "context").processed(ask(("video", video)))
    assert float(inputs["second_per_grid_ts"][0]) == pytest.approx(2 / (8.0 * FRAMES / 20))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_images_are_answered_as_by_generate(name: str, saved: Save) -> None:
    loaded = load(saved(name), CPU)
    pictures = [np.random.default_rng(i).integers(0, 255, (16, 16 + 16 * i, 3), dtype=np.uint8) for i in range(2)]
    asked = ask(*(("image", Image.fromarray(picture)) for picture in pictures))
    with get_method("fp16", kv_dtype="model").bind(loaded.model) as bound:
        engine = Engine(loaded, bound, "paper")
        reply = engine.answer(asked, {"max_new_tokens": 4}).reply
        assert reply.tokens == generated(loaded, engine.processed(asked), 4)


@pytest.mark.parametrize(("name", "per_frame"), [("qwen2_vl", 4), ("qwen2_5_vl", 4), ("qwen3_vl", 4)])
def test_max_pixels_limits_a_frame(name: str, per_frame: int, saved: Save, video: str) -> None:
    """Frames of 32 x 32 have 16 visual tokens a pair; 256 pixels leave four."""
    grids = []
    for limit in (None, 256):
        loaded = load(saved(name, max_pixels=limit), CPU)
        with get_method("fp16").bind(loaded.model) as bound:
            grids.append(Engine(loaded, bound, "context").processed(ask(("video", video)))["video_grid_thw"][0])
    assert [int(grid[1:].prod()) // 4 for grid in grids] == [16, per_frame]


@pytest.mark.parametrize(("name", "reason"), [("llava_onevision", "one size"), ("llava", "takes no videos")])
def test_max_pixels_is_refused_where_it_means_nothing(name: str, reason: str, saved: Save) -> None:
    with pytest.raises(UserError, match=f"model.max_pixels is set, but this model .*{reason}: set it to null"):
        load(saved(name, max_pixels=256), CPU)


def test_pickled_weights_are_not_loaded(saved: Save, tmp_path: Path) -> None:
    model, processor = build("llava")
    processor.save_pretrained(tmp_path)
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot be loaded as an image-text-to-text model: .*safetensors"):
        load(ModelSettings("pickled", str(tmp_path), FRAMES), CPU)


@pytest.mark.parametrize("path", sorted((CONF / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_model_configuration_is_one(path: Path) -> None:
    settings = group_settings(ModelSettings, "model", OmegaConf.to_container(OmegaConf.load(path)))  # type: ignore[arg-type]
    assert settings.name == path.stem and settings.frames >= 1 and not settings.trust_remote_code
    assert settings.stand_in == path.stem.startswith("mini_")
    if not settings.stand_in:
        assert settings.pretrained.count("/") == 1 and settings.calibration == f"results/calibration/{path.stem}.json"


def test_frames_are_the_papers_where_it_names_them() -> None:
    frames = {path.stem: OmegaConf.load(path).frames for path in (CONF / "model").glob("*.yaml")}
    assert frames["internvl2_5_8b"] == 25
    assert {frames[name] for name in ("llava_onevision_7b", "qwen2_vl_7b", "qwen2_5_vl_7b")} == {100}


def test_lmms_evals_command_line_sets_max_pixels(saved: Save, video: str) -> None:
    model = WindowQuantModel(saved("qwen2_vl").pretrained, "fp16", frames=FRAMES, max_pixels=256, device="cpu")
    processed = conversation.processed(model._loaded.processor, ask(("video", video)), FRAMES)
    assert processed["video_grid_thw"].tolist() == [[FRAMES // 2, 4, 4]]
