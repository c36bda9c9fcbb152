"""Frames of a video file, and a bounded memory of what the processor made of them."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import av
import numpy as np
from torch import Tensor

from windowquant.errors import UserError


class VideoError(UserError):
    """A video that is missing, cannot be decoded, or holds no frame; the sentence names it."""


def sample_frames(path: str | Path, count: int) -> np.ndarray:
    """Decode `count` uniformly spaced frames (all of them, some repeated, where the video has fewer).

    Frame i is the one at position floor((i + 1/2) * total / count), the middle of the i-th of `count` equal parts.

    Returns:
        uint8 [count, height, width, 3], RGB.

    Raises:
        VideoError: the file is missing, unreadable or without a frame.
    """
    identity(path)
    try:
        stated = _stated_frames(path)
        kept, seen = _decode(path, _positions(stated, count))
        if seen == 0:
            raise VideoError(f"Video {path} has no frames: replace the file.")
        if seen != stated:
            kept, _ = _decode(path, _positions(seen, count))
        return np.stack([kept[i] for i in _positions(seen, count)])
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"Video {path} cannot be decoded ({error}): replace the file.") from error


def _positions(total: int, count: int) -> list[int]:
    return [int((i + 0.5) * total / count) for i in range(count)]


def _stated_frames(path: str | Path) -> int:
    """The frame count that the container claims; 0 where it claims none."""
    with av.open(str(path)) as container:
        frames = container.streams.video[0].frames if container.streams.video else 0
    return int(frames)


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
        self._kept: OrderedDict[Identity, tuple[Any, int]] = OrderedDict()
        self._bytes = 0

    def get(self, key: Identity) -> Any:
        """The value, None if it was never put or is forgotten."""
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def put(self, key: Identity, value: Any, size: int) -> None:
        """Remember a value of `size` bytes; one larger than `max_bytes` is not kept."""
        self._kept[key] = value, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self._bytes -= freed


class VideoMemory:
    """Stands in for a processor's `video_processor`: takes paths, decodes, and remembers the result per video.

    Several questions share one video, and several methods the same questions: decoding and resizing happen once while
    the video is remembered. Everything else is the wrapped object's.
    """

    def __init__(self, video_processor: Any, frames: int, max_bytes: int = 3 << 28) -> None:
        self._processor = video_processor
        self._frames = frames
        self._memory = Memory(max_bytes)

    def __getattr__(self, name: str) -> Any:
        if name == "_processor":  # not set yet: this is a copy being made
            raise AttributeError(name)
        return getattr(self._processor, name)

    def __call__(self, videos: Any, **kwargs: Any) -> Any:
        """One video path in a list -> the wrapped processor's output for its frames."""
        (path,) = videos
        key = identity(path)
        found = self._memory.get(key)
        if found is None:
            found = self._processor([sample_frames(path, self._frames)], **{**kwargs, "do_sample_frames": False})
            self._memory.put(key, found, sum(v.nbytes for v in found.values() if isinstance(v, Tensor | np.ndarray)))
        return found


def identity(path: str | Path) -> Identity:
    """What tells one state of a video file from another: path, time of change (ns), size (bytes).

    Raises:
        VideoError: the file is missing.
    """
    if not Path(path).is_file():
        raise VideoError(f"Video {path} does not exist: check the data folder.")
    stat = Path(path).stat()
    return str(path), stat.st_mtime_ns, stat.st_size
