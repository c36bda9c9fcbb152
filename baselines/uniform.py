"""Round-to-nearest with one bit-width for every whole window of visual tokens."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windowquant.core.packing import check_bits
from windowquant.method import Status
from windowquant.models import Prompt
from windowquant.window_method import WindowMethod


@dataclass(frozen=True)
class Uniform(WindowMethod):
    """All windows at `bits_per_code` bits: 8, 4, 2 or 1. Set `granularity` for coarser groups, such as "token"."""

    bits_per_code: int = 4

    name: ClassVar[str] = "uniform"
    declared: ClassVar[Status] = "control"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.bits_per_code)

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        return torch.full((len(sensitivity), prompt.windows(self.window_size).shape[1]), self.bits_per_code)


@dataclass(frozen=True)
class UniformInt4(Uniform):
    """All windows in INT4 per window and channel: 5 bits an element with scale and offset at 32 tokens a window."""

    name: ClassVar[str] = "uniform_int4"


@dataclass(frozen=True)
class UniformInt2(Uniform):
    """All windows in INT2 per window and channel: 3 bits an element with scale and offset at 32 tokens a window."""

    bits_per_code: int = 2

    name: ClassVar[str] = "uniform_int2"
