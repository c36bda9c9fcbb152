"""Transformers' quantized cache in 8-bit floating point."""

from dataclasses import dataclass
from typing import ClassVar

from windowquant.stock_method import StockQuantized


@dataclass(frozen=True)
class HfFp8(StockQuantized):
    """Official: E4M3 with one scale for K and one for V of a layer, set by the first update and kept from then on.

    Later values beyond the scale's range are cut to it (by this version of torch).
    """

    name: ClassVar[str] = "hf_fp8"
