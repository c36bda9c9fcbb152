"""Finding, identifying and loading checkpoints."""

import copy
import hashlib
import os
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.utils import logging as transformers_logging

from windowquant.calibration import FILE_NAME as CALIBRATION
from windowquant.errors import UserError
from windowquant.harness.settings import ModelSettings
from windowquant.harness.video import Memory, VideoMemory

CHECKPOINTS = Path(__file__).resolve().parents[1] / "mini" / "checkpoints"
_WHOLE_FILE = 64 << 20
_FEATURE_BYTES = 1 << 30
_CALIBRATION = Path(CALIBRATION).stem


@dataclass(frozen=True)
class Checkpoint:
    """Where a model is loaded from, and what identifies its weights.

    `fingerprint` is the commit of a hub repository, or a hash over a local folder's files.
    """

    source: str
    revision: str | None
    fingerprint: str


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode on its device, its processor (which takes video paths), and what identifies them.

    `frames` are taken of each video. `features` remembers what the vision tower made of each video or image.
    """

    model: Any
    processor: Any
    checkpoint: Checkpoint
    frames: int
    features: Memory = field(default_factory=lambda: Memory(_FEATURE_BYTES))

    def showing(self, frames: int) -> "Loaded":
        """The same model with another number of frames of each video, whose features are remembered apart."""
        if frames == self.frames:
            return self
        processor = copy.copy(self.processor)
        if getattr(processor, "video_processor", None) is not None:
            processor.video_processor = processor.video_processor.showing(frames)
        return Loaded(self.model, processor, self.checkpoint, frames)


def embedded_names() -> list[str]:
    """Names of the checkpoints inside the package, `mini_<folder>`."""
    return sorted(f"mini_{config.parent.name}" for config in CHECKPOINTS.glob("*/config.json"))


def find(pretrained: str, revision: str | None = None) -> Checkpoint:
    """Resolve the name of an embedded checkpoint, a local folder or a hub id, without loading any weight.

    Raises:
        UserError: there is no such checkpoint, or the hub cannot be reached.
    """
    embedded = CHECKPOINTS / pretrained.removeprefix("mini_")
    folder = embedded if pretrained in embedded_names() else Path(pretrained).expanduser()
    if (folder / "config.json").is_file():
        source = pretrained if folder == embedded else str(folder)
        return Checkpoint(source, None, hash_folder(str(folder.resolve())))
    if pretrained.count("/") != 1 or pretrained.startswith((".", "/", "~")) or folder.is_dir():
        known = ", ".join(embedded_names()) or "none"
        raise UserError(
            f"Unknown model '{pretrained}': give a folder with a config.json, a hub id (owner/name), "
            f"or an embedded checkpoint ({known})."
        )
    commit = _hub_commit(pretrained, revision)
    return Checkpoint(pretrained, revision, commit)


def folder_of(checkpoint: Checkpoint) -> str:
    """What `from_pretrained` is given."""
    embedded = checkpoint.source in embedded_names()
    return str(CHECKPOINTS / checkpoint.source.removeprefix("mini_")) if embedded else checkpoint.source


def _hub_commit(name: str, revision: str | None) -> str:
    try:
        path = Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # the hub client raises a dozen kinds for "not there" and "not reachable"
        raise UserError(
            f"Model '{name}' is neither in the local cache nor can it be fetched from the hub "
            f"({type(error).__name__}): check the name and the network, or give a local folder as model.pretrained."
        ) from error
    return path.parent.name  # .../snapshots/<commit>/config.json


@lru_cache(maxsize=16)
def hash_folder(folder: str) -> str:
    """SHA-256 over a folder's files: names, sizes and contents; of files above 64 MiB only the first and last 1 MiB.

    Calibration files are left out: what a method uses of them is in the run's own configuration.
    """
    total = hashlib.sha256()
    kept = (p for p in Path(folder).iterdir() if p.suffix in {".json", ".safetensors", ".jinja", ".txt"})
    for path in sorted(p for p in kept if p.stem != _CALIBRATION):
        size = path.stat().st_size
        total.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            if size <= _WHOLE_FILE:
                total.update(file.read())
            else:
                total.update(file.read(1 << 20))
                file.seek(-(1 << 20), os.SEEK_END)
                total.update(file.read())
    return total.hexdigest()[:16]


@lru_cache(maxsize=1)
def load(settings: ModelSettings, device: torch.device) -> Loaded:
    """Load model and processor; kept for the next run with the same settings in this process.

    Raises:
        UserError: no such checkpoint, one without safetensors, or one that is no image-text-to-text model.
    """
    checkpoint = find(settings.pretrained, settings.revision)
    where = folder_of(checkpoint)
    transformers_logging.disable_progress_bar()
    common = {"revision": settings.revision or "main", "trust_remote_code": settings.trust_remote_code}
    try:
        processor = AutoProcessor.from_pretrained(where, **common)
        model = AutoModelForImageTextToText.from_pretrained(where, dtype=settings.dtype, use_safetensors=True, **common)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"Model '{settings.pretrained}' cannot be loaded as an image-text-to-text model: {reason}"
        ) from error
    _prepare(processor, settings)
    return Loaded(model.eval().to(device), processor, checkpoint, settings.frames)


def _prepare(processor: Any, settings: ModelSettings) -> None:
    """Have the processor take paths of videos, if it takes videos."""
    if getattr(processor, "video_processor", None) is not None:
        processor.video_processor = VideoMemory(
            processor.video_processor, settings.frames, max_pixels=settings.max_pixels
        )
    elif getattr(processor, "image_processor", None) is None:
        raise UserError(f"Model '{settings.pretrained}' has no image processor: use one that takes images or videos.")
    elif settings.max_pixels is not None:
        raise UserError("model.max_pixels is set, but this model takes no videos: set it to null.")
