"""Transformers' quantized cache with HQQ (https://github.com/mobiusml/hqq)."""

from dataclasses import dataclass
from typing import ClassVar

from windowquant.stock_method import StockQuantized


@dataclass(frozen=True)
class HfHqq(StockQuantized):
    """Official, with axis 1 for K and V as transformers' documentation advises (its default is 0): INT4, groups of 64
    consecutive channels of one token, a residual of 128.

    HQQ packs the rows of groups in halves (INT4) or quarters (INT2) and refuses other numbers of them.

    The zero points are refined (HQQ's `optimize`), in half precision on a GPU and in float32 on a CPU, so that results
    differ between the two.
    """

    nbits: int = 4
    axis_key: int = 1
    axis_value: int = 1
    q_group_size: int = 64
    residual_length: int = 128

    name: ClassVar[str] = "hf_hqq"
