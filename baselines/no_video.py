"""The control that shows whether an evaluation depends on the video's cache at all."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windowquant.method import Status
from windowquant.models import Prompt
from windowquant.window_method import WindowMethod


@dataclass(frozen=True)
class NoVideo(WindowMethod):
    """K and V of every visual token are discarded after prefill; all other tokens keep their positions."""

    name: ClassVar[str] = "no_video"
    declared: ClassVar[Status] = "control"
    drops_visual: ClassVar[bool] = True

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        return torch.zeros(len(sensitivity), 0)
