"""The uncompressed cache, through the same code as every other method."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windowquant.method import Status
from windowquant.models import Prompt
from windowquant.window_method import WindowMethod


@dataclass(frozen=True)
class FP16(WindowMethod):
    """Every window stays in 16 bit. With kv_dtype="model" it computes exactly what transformers' own cache does."""

    name: ClassVar[str] = "fp16"
    declared: ClassVar[Status] = "control"

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        return torch.zeros(len(sensitivity), 0)  # no windows, then
