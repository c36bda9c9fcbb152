"""Frames of a video file, and a bounded memory of what the processor made of them."""

from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import av
import numpy as np
from torch import Tensor
from transformers import Qwen3VLVideoProcessor

from windowquant.errors import UserError


class VideoError(UserError):
    """A video that is missing, cannot be decoded, or holds no frame; the sentence names it."""


def sample_frames(path: str | Path, count: int) -> np.ndarray:
    """The frames of `sample_video` alone: uint8 [count, height, width, 3], RGB."""
    return sample_video(path, count)[0]


def sample_video(path: str | Path, count: int) -> tuple[np.ndarray, dict[str, Any]]:
    """Decode `count` uniformly spaced frames (all of them, some repeated, where the video has fewer).

    Frame i is the one at position floor((i + 1/2) * total / count), the middle of the i-th of `count` equal parts.

    Returns:
        uint8 [count, height, width, 3], RGB; and where they come from, in transformers' `VideoMetadata` fields: frames
        in all, frames a second (None where the file does not say), positions taken.

    Raises:
        VideoError: the file is missing, unreadable or without a frame.
    """
    identity(path)
    try:
        stated, fps = _stated(path)
        kept, seen = _decode(path, _positions(stated, count))
        if seen == 0:
            raise VideoError(f"Video {path} has no frames: replace the file.")
        if seen != stated:
            kept, _ = _decode(path, _positions(seen, count))
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"Video {path} cannot be decoded ({error}): replace the file.") from error
    positions = _positions(seen, count)
    metadata = {"total_num_frames": seen, "fps": fps, "frames_indices": positions}
    return np.stack([kept[i] for i in positions]), metadata


def _positions(total: int, count: int) -> list[int]:
    return [int((i + 0.5) * total / count) for i in range(count)]


def _stated(path: str | Path) -> tuple[int, float | None]:
    """Frames in all and frames a second, as the container claims; 0 and None where it claims nothing."""
    stated: tuple[int, float | None] = 0, None
    with av.open(str(path)) as container:
        for stream in container.streams.video[:1]:
            stated = int(stream.frames), float(stream.average_rate) if stream.average_rate else None
    return stated


def _decode(path: str | Path, positions: list[int]) -> tuple[dict[int, np.ndarray], int]:
    """Frames at the given positions, and how many frames there really are."""
    wanted, kept, seen = set(positions), {}, 0
    with av.open(str(path)) as container:
        for frame in container.decode(video=0) if container.streams.video else ():
            if seen in wanted:
                kept[seen] = frame.to_ndarray(format="rgb24")
            seen += 1
    return kept, seen


Identity = tuple[str, int, int]


class Memory:
    """Values by video, within `max_bytes`: the least recently used is forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Hashable) -> Any:
        """The value, None if it was never put or is forgotten."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: Hashable, value: Any, size: int) -> None:
        """Remember a value of `size` bytes; one larger than `max_bytes` is not kept."""
        self._kept[key] = value, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed


class VideoMemory:
    """Stands in for a processor's `video_processor`: takes paths, decodes, and remembers the result per video.

    Several questions share one video, and several methods the same questions: decoding and resizing happen once while
    the video is remembered. Exactly `frames` frames of each video go in, with their times; the processor samples none
    of them away. max_pixels: most pixels of a frame, for a processor that keeps a video's own resolution; None leaves
    the checkpoint's limit. Everything else is the wrapped object's.

    Raises UserError if there is a `max_pixels` and the processor resizes every frame to one size.
    """

    def __init__(
        self, video_processor: Any, frames: int, max_bytes: int = 3 << 28, max_pixels: int | None = None
    ) -> None:
        self._processor = video_processor
        self._frames = frames
        self._max_pixels = max_pixels
        self._memory = Memory(max_bytes)
        self._fixed: dict[str, Any] = {"do_sample_frames": False, **_dynamic(video_processor, frames, max_pixels)}

    def __getattr__(self, name: str) -> Any:
        if name == "_processor":  # not set yet: this is a copy being made
            raise AttributeError(name)
        return getattr(self._processor, name)

    def showing(self, frames: int) -> "VideoMemory":
        """The same with another number of frames, and nothing remembered."""
        return VideoMemory(self._processor, frames, max_pixels=self._max_pixels)

    def __call__(self, videos: Any, **kwargs: Any) -> Any:
        """Video paths in a list -> the wrapped processor's output for their frames."""
        key = tuple(identity(path) for path in videos)
        found = self._memory.get(key)
        if found is None:
            read = [sample_video(path, self._frames) for path in videos]
            metadata = [where for _, where in read]
            settings = {**kwargs, **self._fixed, "video_metadata": metadata}
            found = self._processor([frames for frames, _ in read], **settings)
            self._memory.put(key, found, sum(v.nbytes for v in found.values() if isinstance(v, Tensor | np.ndarray)))
        return found


def _dynamic(processor: Any, frames: int, max_pixels: int | None) -> dict[str, Any]:
    """How a processor that keeps a video's own resolution is told its limit; nothing for others."""
    known = getattr(getattr(processor, "valid_kwargs", None), "__annotations__", {})
    own = {"cap_pixels_per_frame": False} if "cap_pixels_per_frame" in known else {}
    if max_pixels is None:
        return own
    size = processor.size
    if not size.get("longest_edge") or not size.get("shortest_edge"):
        raise UserError("model.max_pixels is set, but this model resizes every frame to one size: set it to null.")
    # Qwen3-VL's limits are those of a whole video, Qwen2-VL's those of a frame
    most = max_pixels * (frames if isinstance(processor, Qwen3VLVideoProcessor) else 1)
    return {**own, "size": {"longest_edge": most, "shortest_edge": min(most, size["shortest_edge"])}}


def identity(path: str | Path) -> Identity:
    """What tells one state of a video file from another: path, time of change (ns), size (bytes).

    Raises:
        VideoError: the file is missing.
    """
    if not Path(path).is_file():
        raise VideoError(f"Video {path} does not exist: check the data folder.")
    stat = Path(path).stat()
    return str(path), stat.st_mtime_ns, stat.st_size
