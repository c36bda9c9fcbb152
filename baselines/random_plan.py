"""WindowQuant's bit counts on windows chosen at random: what the search is worth (paper, Table 8, row B)."""

import zlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windowquant.models import Prompt
from windowquant.windowquant_method import WindowQuant


@dataclass(frozen=True)
class RandomPlan(WindowQuant):
    """Each layer keeps as many windows of each bit-width as WindowQuant gives it, but not the same ones.

    Window 0 keeps its 16 bits, for it does not owe them to its score. The shuffle is drawn from `seed` and the prompt's
    tokens: the same for a request wherever it is run, another for each request and layer.
    """

    seed: int = 0

    name: ClassVar[str] = "random_plan"

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        plan = super().bits(prompt, scores, sensitivity)
        drawn_from = f"{self.seed}:".encode() + prompt.input_ids.numpy().tobytes()
        generator = torch.Generator().manual_seed(zlib.crc32(drawn_from))
        order = torch.rand(plan.shape[0], max(0, plan.shape[1] - 1), generator=generator).argsort(1)
        plan[:, 1:] = plan[:, 1:].gather(1, order)
        return plan
