"""What the training must know about an architecture, in one small class each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

from windowquant.mini.scenes import FRAMES
from windowquant.mini.text_model import initialise

BEFORE_VIDEO = "<|im_start|>user "


@dataclass(frozen=True)
class Layout:
    """A prompt up to its last visual token: ids [T], and the ascending columns of the visual tokens."""

    ids: list[int]
    visual: list[int]


class Architecture:
    """A transformers class and how it sees a video of the mini world.

    name: folder of the checkpoint, and the config's `model_type`. frames: how many of a video's 96 frames the model is
    given, evenly spaced. merged: how many frames in a row share one set of PER_FRAME visual tokens (a group).
    after_video: the text between the last visual token and the question.
    """

    name: ClassVar[str]
    frames: ClassVar[int]
    merged: ClassVar[int] = 1
    after_video: ClassVar[str] = "\n"

    @property
    def stride(self) -> int:
        """Frames of the video from one group to the next."""
        return FRAMES * self.merged // self.frames

    def sampled(self, video: np.ndarray) -> np.ndarray:
        """The frames that the model is given of a video [96, ...]: the middles of equal parts, as the harness takes."""
        return video[[int((i + 0.5) * len(video) / self.frames) for i in range(self.frames)]]

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        raise NotImplementedError

    def build_processor(self, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
        raise NotImplementedError

    def build_config(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        raise NotImplementedError

    def build_class(self) -> type[PreTrainedModel]:
        raise NotImplementedError

    def build_model(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
        """float32, on the CPU, initialised from the seed."""
        torch.manual_seed(seed)
        model = self.build_class()(self.build_config(tokenizer))
        initialise(model, seed)
        return model

    def vision(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        """What the vision stage trains besides the word embeddings, by name."""
        raise NotImplementedError

    def frame_tokens(self, model: PreTrainedModel, pixels: Tensor) -> Tensor:
        """The class's own way from pixels [n, merged, 3, 64, 64] (0 to 255) to visual tokens [n, PER_FRAME, C]."""
        raise NotImplementedError

    def settle(self, model: PreTrainedModel, pixels: Tensor) -> None:
        """What is left to do once all stages are trained; pixels are stills of the training."""

    def layout(self, tokenizer: PreTrainedTokenizerFast, groups: int) -> Layout:
        """How the processor writes a video of so many groups."""
        raise NotImplementedError

    def embed(self, model: PreTrainedModel, words: Tensor, visual: Tensor, layout: Layout) -> Tensor:
        """Word embeddings [B, T, C] with the visual tokens [B, M, C] of each row in their columns."""
        out = words.clone()
        out[:, layout.visual] = visual
        return out

    def emitted(self, model: PreTrainedModel) -> Mapping[str, nn.Parameter]:
        """Parameters outside the language model that stand in its prompt and are trained with it, by name."""
        return {}

    def positions(self, counted: Tensor, part: Tensor, layout: Layout) -> Tensor:
        """Rotary positions, [B, T] or [axes, B, T], of training rows.

        counted: [B, T], each part of a row counted on from its common part. part: [B, T], 0 in the common part.
        """
        return counted
