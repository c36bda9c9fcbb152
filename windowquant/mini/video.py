"""Writes frames as an mp4 file through PyAV."""

from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
from av.codec.codec import UnknownCodecError

# H.264 at a quality that leaves colours alone; MPEG-4 at its finest quantizers where FFmpeg was built without x264
_OPTIONS = {"libx264": {"crf": "14", "preset": "superfast"}, "mpeg4": {"qmin": "1", "qmax": "2"}}


@cache
def encoder() -> str:
    """The name of the video encoder that this machine's FFmpeg offers: libx264, or mpeg4 where that is missing."""
    try:
        av.Codec("libx264", "w")
    except UnknownCodecError:
        return "mpeg4"
    return "libx264"


def write_mp4(frames: np.ndarray, path: Path, fps: int, codec: str | None = None) -> None:
    """Writes [frames, height, width, 3] uint8 RGB (even sides) as yuv420p video. One encoder thread: the same frames
    give the same bytes."""
    codec = codec or encoder()
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=fps, options=_OPTIONS[codec])
        assert isinstance(stream, av.VideoStream)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.thread_count = 1
        if codec == "mpeg4":
            stream.bit_rate = 8_000_000
        for k, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = k, Fraction(1, fps)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
