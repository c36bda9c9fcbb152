"""How a cache stores what a plan says."""

from dataclasses import dataclass

import torch

from windowquant.core.quantizer import Granularity, ZeroPoint

KV_DTYPES = ("auto", "model")


def storage_dtype(kv_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of unquantized K and V and of scales: "auto" turns a wider model dtype into float16, "model" keeps it."""
    return torch.float16 if kv_dtype == "auto" and model_dtype.itemsize > 2 else model_dtype


@dataclass(frozen=True)
class Recipe:
    """Storage options, the same for every layer of a cache.

    window_size: tokens a window (S). granularity, zero_point: of the quantizer. kv_dtype: "auto" or "model" (see
    `storage_dtype`). drops_visual: visual tokens are discarded after prefill instead of stored; drops_between: with
    them the text between the first and the last. v_widths: pairs (bits of K, bits of V) for windows whose V does not
    have the plan's bit-width, which is that of K. reorder: windows of one bit-width are stored together (Algorithm 2),
    not in the video's order. peaks: for each layer the largest absolute value that its symmetric codes reach in K and
    in V, where these are known beforehand.
    """

    window_size: int
    granularity: Granularity = "window_channel"
    zero_point: ZeroPoint = "integer"
    kv_dtype: str = "auto"
    drops_visual: bool = False
    drops_between: bool = False
    v_widths: tuple[tuple[int, int], ...] = ()
    reorder: bool = True
    peaks: tuple[tuple[float, float], ...] = ()

    def v_bits(self, bits: int) -> int:
        """Bits of a window's V where the plan, and so its K, has `bits`."""
        return dict(self.v_widths).get(bits, bits)

    def peaks_of(self, layer: int) -> tuple[float, float] | tuple[None, None]:
        """Peaks of a layer's K and V, None where each group has its own."""
        return self.peaks[layer] if self.peaks else (None, None)

    def storage_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype of unquantized K and V and of scales."""
        return storage_dtype(self.kv_dtype, model_dtype)
