"""Fewer frames for the same bytes: how many are shown, which ones, and what is recorded."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from windowquant.errors import UserError
from windowquant.harness.loading import load
from windowquant.harness.runner import run
from windowquant.harness.settings import RunSettings
from windowquant.harness.video import sample_frames
from windowquant.method import get_method

Make = Callable[..., RunSettings]


@pytest.mark.parametrize(("bits", "shown"), [(5.0, 30), (3.0, 18), (16.0, 96), (0.01, 1)])
def test_bytes_decide_how_many(bits: float, shown: int) -> None:
    assert get_method("fewer_frames", equal_bits=bits).frames(96) == shown
    assert get_method("fp16").frames(96) == 96


def test_bits_out_of_range_are_refused() -> None:
    for bits in (0.0, 17.0):
        with pytest.raises(UserError, match="equal_bits is"):
            get_method("fewer_frames", equal_bits=bits)


def test_the_model_sees_frames_of_the_whole_video(make_settings: Make, tiny_data: Path) -> None:
    loaded = load(make_settings().model, torch.device("cpu"))
    fewer, video = loaded.showing(2), str(tiny_data / "nextqa/NExTVideo/9000000000.mp4")
    assert loaded.showing(8) is loaded and fewer.model is loaded.model and fewer.features is not loaded.features
    for each, count in ((fewer, 2), (loaded, 8)):
        pixels = each.processor.video_processor([video], return_tensors="pt")["pixel_values_videos"]
        plain = loaded.processor.video_processor._processor([sample_frames(video, count)], return_tensors="pt")
        assert torch.equal(pixels, plain["pixel_values_videos"])


def test_a_run_holds_the_bytes_that_it_may(make_settings: Make) -> None:
    whole = run(make_settings(method="fp16", params={}))
    fewer = run(make_settings(method="fewer_frames", params={"equal_bits": 4.0}))
    assert (whole.visual_tokens, fewer.visual_tokens) == (33, 9)  # 8 and 2 frames of 4 tokens, and a newline
    per_token = whole.kv_breakdown["fp16_windows"] / 33
    assert fewer.kv_breakdown["fp16_windows"] == 9 * per_token
    assert fewer.kl is not None and fewer.kl > 0
    assert fewer.kv_fp16 == whole.kv_fp16 > fewer.kv_predicted, "FP16 of the whole video"
    assert fewer.kv_ratio == whole.kv_fp16 / fewer.kv_bytes > 1
