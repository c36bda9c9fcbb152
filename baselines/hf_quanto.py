"""Transformers' quantized cache with optimum-quanto (https://github.com/huggingface/optimum-quanto)."""

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.stock_method import StockQuantized


@dataclass(frozen=True)
class HfQuanto(StockQuantized):
    """Official, with transformers' defaults: INT4, groups of 64, axis 0 for K and V, a residual of 128.

    Axis 0 groups `q_group_size` consecutive channels of one token, whatever transformers' documentation calls it; axis
    -1 groups rows of the flattened (batch, head, token) for one channel, across heads and requests where their length
    is no multiple of the group. Scale and shift are in the model's dtype.

    On CPU the codes are unpacked by plain torch operations, for quanto would first compile its own kernel, which takes
    minutes and a C++ compiler and gives the same codes; on a GPU its kernel is used.
    """

    nbits: int = 4
    axis_key: int = 0
    axis_value: int = 0
    q_group_size: int = 64
    residual_length: int = 128

    name: ClassVar[str] = "hf_quanto"

    def prepare(self, model: PreTrainedModel, undo: ExitStack) -> None:
        from optimum.quanto.library.extensions import get_extension

        extension = get_extension("quanto_cpp")
        if extension._lib is None:
            extension._lib = SimpleNamespace(unpack=_unpack)
            undo.callback(setattr, extension, "_lib", None)


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Codes of uint8 rows that hold equal blocks of them, the first block in the low bits."""
    return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
