"""Which frames are taken, what is remembered, and what is said of files that cannot be read."""

from copy import deepcopy
from pathlib import Path

import av
import numpy as np
import pytest

from tests.tiny import SIDE, tiny_processor, write_video
from windowquant.harness.video import VideoError, VideoMemory, sample_frames


def write_grey(path: Path, levels: list[int]) -> Path:
    """A video whose frame i is the grey `levels[i]`."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        for level in levels:
            frame = av.VideoFrame.from_ndarray(np.full((SIDE, SIDE, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def levels_of(frames: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 10) * 10 for frame in frames]


@pytest.mark.parametrize(
    ("total", "count", "taken"),
    [(8, 8, range(8)), (8, 4, [1, 3, 5, 7]), (8, 1, [4]), (9, 3, [1, 4, 7]), (2, 4, [0, 0, 1, 1]), (1, 3, [0, 0, 0])],
)
def test_frames_are_the_middles_of_equal_parts(tmp_path: Path, total: int, count: int, taken: list[int]) -> None:
    frames = sample_frames(write_grey(tmp_path / "v.mp4", [30 + 20 * i for i in range(total)]), count)
    assert frames.shape == (count, SIDE, SIDE, 3)
    assert frames.dtype == np.uint8
    assert levels_of(frames) == [30 + 20 * i for i in taken]


def test_a_container_without_a_frame_count_is_counted(tmp_path: Path) -> None:
    path = write_grey(tmp_path / "v.mkv", [30, 80, 130, 180])
    with av.open(str(path)) as container:
        assert container.streams.video[0].frames == 0
    assert levels_of(sample_frames(path, 2)) == [80, 180]


def empty_video(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        container.start_encoding()


def sound_only(path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_bytes(b"not a video" * 100), "cannot be decoded"),
        (lambda path: path.write_bytes(b""), "cannot be decoded"),
        (empty_video, "has no frames|cannot be decoded"),
        (sound_only, "has no frames"),
    ],
)
def test_a_bad_video_is_named(tmp_path: Path, write: object, reason: str) -> None:
    path = tmp_path / "clip.mp4"
    write(path)
    with pytest.raises(VideoError, match=rf"clip\.mp4 ({reason})"):
        sample_frames(path, 4)


def test_a_truncated_video_is_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", frames=64)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(VideoError, match=r"v\.mp4"):
        sample_frames(path, 4)


class Counting:
    """A video processor that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.inner = tiny_processor().video_processor
        self.size = self.inner.size

    def __call__(self, videos: list[np.ndarray], **kwargs: object) -> object:
        self.calls += 1
        return self.inner(videos, **kwargs)


def test_a_video_is_processed_once_while_it_is_remembered(tmp_path: Path) -> None:
    first, second = (str(write_video(tmp_path / f"{i}.mp4", seed=i)) for i in range(2))
    counting = Counting()
    memory = VideoMemory(counting, frames=4)
    assert memory.size == deepcopy(memory).size == counting.size
    one = memory([first], return_tensors="pt")["pixel_values_videos"]
    assert one.shape == (1, 4, 3, SIDE, SIDE)
    assert memory([first], return_tensors="pt")["pixel_values_videos"] is one
    assert not one.equal(memory([second], return_tensors="pt")["pixel_values_videos"])
    assert counting.calls == 2


def test_a_changed_file_is_processed_again(tmp_path: Path) -> None:
    counting = Counting()
    memory = VideoMemory(counting, frames=4)
    path = write_video(tmp_path / "v.mp4", frames=8)
    before = memory([str(path)], return_tensors="pt")["pixel_values_videos"]
    write_video(path, frames=9, seed=5)
    assert not before.equal(memory([str(path)], return_tensors="pt")["pixel_values_videos"])
    assert counting.calls == 2


def test_the_least_recently_used_video_is_forgotten_first(tmp_path: Path) -> None:
    paths = [str(write_video(tmp_path / f"{i}.mp4", seed=i)) for i in range(3)]
    counting = Counting()
    size = 4 * 3 * SIDE * SIDE * 4
    memory = VideoMemory(counting, frames=4, max_bytes=2 * size)
    for path in (paths[0], paths[1], paths[0], paths[2]):  # 1 is forgotten when 2 comes
        memory([path], return_tensors="pt")
    assert counting.calls == 3
    memory([paths[0]], return_tensors="pt")
    assert counting.calls == 3
    memory([paths[1]], return_tensors="pt")
    assert counting.calls == 4


def test_a_video_that_vanished_is_named_though_it_is_remembered(tmp_path: Path) -> None:
    memory = VideoMemory(Counting(), frames=4)
    path = write_video(tmp_path / "v.mp4")
    memory([str(path)], return_tensors="pt")
    path.unlink()
    with pytest.raises(VideoError, match=r"v\.mp4 does not exist"):
        memory([str(path)], return_tensors="pt")
