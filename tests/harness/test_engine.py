"""From messages to inputs to text, on the tiny model."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.tiny import write_video
from windowquant.errors import UserError
from windowquant.harness.conversation import ImageError
from windowquant.harness.engine import Engine
from windowquant.harness.loading import Loaded, load
from windowquant.harness.settings import RunSettings
from windowquant.harness.video import VideoError, sample_frames
from windowquant.method import get_method


@pytest.fixture
def loaded(make_settings: Callable[..., RunSettings]) -> Loaded:
    return load(make_settings().model, torch.device("cpu"))


@pytest.fixture
def engine(loaded: Loaded) -> Iterator[Engine]:
    with get_method("fp16", kv_dtype="model").bind(loaded.model) as bound:
        yield Engine(loaded, bound, "context")


@pytest.fixture
def video(tiny_data: Path) -> str:
    return str(tiny_data / "nextqa/NExTVideo/9000000000.mp4")


def message(*videos: str, text: str = "why?") -> list[dict]:
    content = [{"type": "video", "url": video} for video in videos]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]


def test_the_processor_sees_the_sampled_frames_and_the_chat_template(
    engine: Engine, loaded: Loaded, video: str
) -> None:
    inputs = engine.processed(message(video))
    frames = sample_frames(video, 8)
    expected = loaded.processor.video_processor._processor([frames], return_tensors="pt")["pixel_values_videos"]
    assert torch.equal(inputs["pixel_values_videos"], expected)
    text = loaded.processor.tokenizer.decode(inputs["input_ids"][0])
    assert text == "user: " + "<video>" * 33 + "why?\nassistant: "


def test_greedy_tokens_are_those_of_generate(engine: Engine, loaded: Loaded, video: str) -> None:
    answer = engine.answer(message(video), {"max_new_tokens": 6})
    inputs = engine.processed(message(video))
    generated = loaded.model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer.reply.tokens == generated.tolist()


def test_the_vision_tower_sees_a_video_once(engine: Engine, loaded: Loaded, tmp_path: Path) -> None:
    seen: list[object] = []
    hook = loaded.model.model.vision_tower.register_forward_hook(lambda *_: seen.append(1))
    path = str(write_video(tmp_path / "another.mp4", seed=77))
    first, second = (engine.answer(message(path, text=text), {"max_new_tokens": 2}) for text in ("why?", "how?"))
    hook.remove()
    assert len(seen) == 1
    assert first.vision_s == second.vision_s > 0


@pytest.mark.parametrize(("own", "given", "length"), [(None, {"max_new_tokens": 3}, 3), (2, {"max_new_tokens": 3}, 2)])
def test_the_run_overrides_the_tasks_length(loaded: Loaded, video: str, own: int, given: dict, length: int) -> None:
    with get_method("fp16").bind(loaded.model) as bound:
        answer = Engine(loaded, bound, "context", own).answer(message(video), given)
    assert len(answer.reply.tokens) == length


def test_text_is_cut_where_the_task_says(engine: Engine, video: str) -> None:
    whole = engine.answer(message(video), {"max_new_tokens": 6}).text
    stop = whole[2]
    assert engine.answer(message(video), {"max_new_tokens": 6, "until": [stop]}).text == whole.split(stop)[0].strip()


@pytest.mark.parametrize("kwargs", [{"do_sample": True}, {"num_beams": 4}])
def test_what_is_not_greedy_is_refused(engine: Engine, video: str, kwargs: dict) -> None:
    with pytest.raises(UserError, match="only greedy decoding"):
        engine.answer(message(video), kwargs)


def test_several_videos_and_images_a_request(engine: Engine, loaded: Loaded, tiny_data: Path, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    photo = Image.fromarray(sample_frames(tiny_data / "nextqa/NExTVideo/9000000001.mp4", 1)[0])
    photo.save(path)
    videos = [str(tiny_data / f"nextqa/NExTVideo/900000000{i}.mp4") for i in range(2)]
    asked = message(*videos)
    asked[0]["content"].insert(1, {"type": "image", "url": str(path)})
    inputs = engine.processed(asked)
    text = loaded.processor.tokenizer.decode(inputs["input_ids"][0])
    image = "<image>" * text.count("<image>")
    assert text == f"user: {'<video>' * 33}{image}{'<video>' * 33}why?\nassistant: " and image
    generated = loaded.model.generate(**inputs, max_new_tokens=4, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert engine.answer(asked, {"max_new_tokens": 4}).reply.tokens == generated.tolist()
    asked[0]["content"][1]["url"] = photo
    assert engine.answer(asked, {"max_new_tokens": 4}).reply.tokens == generated.tolist()


def test_a_request_without_anything_to_see_is_refused(engine: Engine, video: str) -> None:
    with pytest.raises(UserError, match="must come with an image or a video; this one has neither"):
        engine.answer(message(), {})
    sound = message(video)
    sound[0]["content"].append({"type": "audio", "url": "x.wav"})
    with pytest.raises(UserError, match="this one has audio"):
        engine.answer(sound, {})


def test_an_unreadable_image_is_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    for name, reason in (("broken", "cannot be decoded"), ("gone", "does not exist")):
        asked = [{"role": "user", "content": [{"type": "image", "url": str(tmp_path / f"{name}.png")}]}]
        with pytest.raises(ImageError, match=rf"{name}\.png {reason}"):
            engine.answer(asked, {})


def test_an_unreadable_video_is_named(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    with pytest.raises(VideoError, match=r"broken\.mp4 cannot be decoded"):
        engine.answer(message(str(tmp_path / "broken.mp4")), {})
