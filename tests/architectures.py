"""Small random models of the real transformers classes with the real processor classes, built without any file.

`build(name)` gives a model (float32, evaluation mode) and its processor; the functions after it make what the processor
returns for one prompt or a batch. Every frame is random noise, so that no two visual tokens are alike.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.builders import ARCHITECTURES, FRAMES, LAYERS, PATCH, PLACEHOLDERS, SIDE, TEXT, build

__all__ = [
    "ARCHITECTURES",
    "FRAMES",
    "LAYERS",
    "PATCH",
    "PLACEHOLDERS",
    "SIDE",
    "TEXT",
    "Ask",
    "batch_inputs",
    "build",
    "frames",
    "image_inputs",
    "multi_image_inputs",
    "multi_video_inputs",
    "process",
    "text_inputs",
    "video_inputs",
]


def frames(count: int = FRAMES, seed: int = 0, height: int = SIDE, width: int = SIDE) -> np.ndarray:
    """Random frames, uint8 [count, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 255, (count, height, width, 3), dtype=np.uint8)


@dataclass
class Ask:
    """One prompt: text with `{image}` and `{video}` where they go, and what goes there."""

    text: str
    images: list[np.ndarray] = field(default_factory=list)
    videos: list[np.ndarray] = field(default_factory=list)


def process(name: str, processor: Any, asks: list[Ask]) -> dict[str, Any]:
    """What the processor returns for these prompts, left-padded. A class without videos gets frames as images."""
    image, video = PLACEHOLDERS[name]
    images, videos, texts = [], [], []
    for ask in asks:
        own = iter(ask.videos)
        text = ask.text
        while "{video}" in text:
            clip = next(own)
            text = text.replace("{video}", video if video else image * len(clip), 1)
            (videos.append if video else images.extend)(clip)
        texts.append(text.replace("{image}", image))
        images += ask.images
    media = {"images": images or None, **({"videos": videos} if videos else {})}
    if videos:
        media["do_sample_frames"] = False
        media["video_metadata"] = [
            {"total_num_frames": 4 * len(v), "fps": 8.0, "frames_indices": list(range(0, 4 * len(v), 4))}
            for v in videos
        ]
    return dict(processor(text=texts, padding=True, return_tensors="pt", **media))


def video_inputs(name: str, processor: Any, seed: int = 0, question: str = "what is this?") -> dict[str, Any]:
    """One prompt with one video of `FRAMES` frames."""
    return process(name, processor, [Ask("user: {video}" + question, videos=[_clip_of(name, seed)])])


def image_inputs(name: str, processor: Any, seed: int = 0) -> dict[str, Any]:
    """One prompt with one image, four times as wide as high."""
    wide = frames(1, seed, SIDE, 4 * SIDE)[0]
    return process(name, processor, [Ask("see {image} and say what it is", images=[wide])])


def multi_image_inputs(name: str, processor: Any, seed: int = 0) -> dict[str, Any]:
    """One prompt with three images of different shapes, two of them side by side."""
    shapes = [(SIDE, SIDE), (2 * SIDE, SIDE), (SIDE, 2 * SIDE)]
    images = [frames(1, seed + i, *shape)[0] for i, shape in enumerate(shapes)]
    return process(name, processor, [Ask("a {image} b {image}{image} which?", images=images)])


def multi_video_inputs(name: str, processor: Any, seed: int = 0) -> dict[str, Any]:
    """One prompt with two videos of the same length."""
    clips = [_clip_of(name, seed), _clip_of(name, seed + 1)]
    return process(name, processor, [Ask("first {video} then {video} which?", videos=clips)])


def text_inputs(name: str, processor: Any) -> dict[str, Any]:
    """One prompt without anything to see."""
    return process(name, processor, [Ask("who are you?")])


def batch_inputs(name: str, processor: Any, seed: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Three prompts of different lengths (two with a video, one of text only), left-padded; and each of them alone."""
    asks = [
        Ask("user: {video} what is it that happens here, and why?", videos=[_clip_of(name, seed)]),
        Ask("user: {video} why?", videos=[_clip_of(name, seed + 1)]),
        Ask("who are you, and what can you do?"),
    ]
    return process(name, processor, asks), [process(name, processor, [ask]) for ask in asks]


def _clip_of(name: str, seed: int) -> np.ndarray:
    """Frames of a shape that the architecture takes as it is: wider than high where resolution is dynamic."""
    return frames(FRAMES, seed, SIDE, SIDE + 2 * PATCH if name.startswith("qwen") else SIDE)
