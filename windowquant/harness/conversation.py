"""A conversation of lmms-eval's chat form, as the processor of each architecture takes it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from windowquant.errors import UserError
from windowquant.harness.video import Identity, VideoError, identity, sample_frames

Messages = list[dict[str, Any]]


class ImageError(VideoError):
    """An image that is missing or cannot be decoded; the sentence names it."""


@dataclass(frozen=True)
class Medium:
    """An image (a path or a PIL image) or a video (a path) of a conversation."""

    kind: str
    source: Any

    def identity(self) -> tuple[str, Identity | str]:
        """What tells one state of it from another. Raises VideoError for a file that is missing."""
        if isinstance(self.source, Image.Image):
            return self.kind, hashlib.sha256(repr(self.source.size).encode() + self.source.tobytes()).hexdigest()
        return self.kind, identity(self.source)

    def image(self) -> Image.Image:
        """An image in RGB. Raises ImageError if it cannot be read."""
        if isinstance(self.source, Image.Image):
            return self.source.convert("RGB")
        if not Path(self.source).is_file():
            raise ImageError(f"Image {self.source} does not exist: check the data folder.")
        try:
            with Image.open(self.source) as opened:
                return opened.convert("RGB")
        except (OSError, ValueError) as error:
            raise ImageError(f"Image {self.source} cannot be decoded ({error}): replace the file.") from error


def media_of(messages: Messages) -> list[Medium]:
    """Images and videos in the order of the conversation. UserError if there is none, or something else."""
    items = [item for message in messages for item in message["content"] if item["type"] != "text"]
    unknown = [item["type"] for item in items if item["type"] not in ("image", "video")]
    if unknown or not items:
        raise UserError(
            f"A request must come with an image or a video; this one has {', '.join(unknown) or 'neither'}."
        )
    return [Medium(item["type"], item["url"]) for item in items]


def processed(processor: Any, messages: Messages, frames: int) -> Any:
    """The processor's output for one conversation, on the CPU.

    A processor that takes videos is given their paths (see `VideoMemory`). One that does not gets `frames` frames of
    each as so many images.
    """
    takes_video = getattr(processor, "video_processor", None) is not None
    media = media_of(messages)
    videos = [str(medium.source) for medium in media if medium.kind == "video"] if takes_video else []
    images = [image for medium in media for image in _images(medium, frames, takes_video)]
    turns = [_bare(message, frames, takes_video) for message in messages]
    text = processor.apply_chat_template(turns, add_generation_prompt=True)
    given: dict[str, Any] = {"images": images} if images else {}
    if videos:
        given["videos"] = videos
    return processor(text=[text], return_tensors="pt", **given)


def _images(medium: Medium, frames: int, takes_video: bool) -> Iterator[Any]:
    if medium.kind == "image":
        yield medium.image()
    elif not takes_video:
        yield from sample_frames(medium.source, frames)


def _bare(message: dict[str, Any], frames: int, takes_video: bool) -> dict[str, Any]:
    """A turn with bare placeholders in place of its media."""
    content: list[dict[str, Any]] = []
    for item in message["content"]:
        if item["type"] == "text":
            content.append(item)
        elif item["type"] == "video" and not takes_video:
            content += [{"type": "image"}] * frames
        else:
            content.append({"type": item["type"]})
    return {"role": message["role"], "content": content}
