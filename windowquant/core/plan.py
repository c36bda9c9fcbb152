"""The plan: how many bits each window of each layer is kept in."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.errors import UserError

PLAN_BITS = (16, 8, 4, 2, 1)
METADATA_BITS = 32  # a 16-bit scale and a 16-bit offset for each group


@dataclass(frozen=True)
class BitPlan:
    """Bit-widths per layer and window; immutable.

    bits: [L][W], each one of 16 (kept as it is), 8, 4, 2, 1. W may be 0: nothing is quantized.
    window_size: tokens a window (S).
    made_by: how the plan came about, for the record (method and its hyper-parameters).
    """

    bits: tuple[tuple[int, ...], ...]
    window_size: int
    made_by: str

    def __post_init__(self) -> None:
        if self.window_size < 1:
            raise UserError(f"window_size of a plan is {self.window_size}; set it to 1 or more.")
        if not self.bits:
            raise UserError("A plan needs at least one layer, but its list of bits is empty.")
        for layer, row in enumerate(self.bits):
            if len(row) != len(self.bits[0]):
                raise UserError(
                    f"Layer {layer} of the plan has {len(row)} windows and layer 0 has {len(self.bits[0])}; "
                    "give every layer the same number."
                )
            unknown = sorted(set(row) - set(PLAN_BITS))
            if unknown:
                raise UserError(f"Layer {layer} of the plan asks for {unknown} bits; use one of {list(PLAN_BITS)}.")

    @classmethod
    def from_tensor(cls, bits: Tensor, window_size: int, made_by: str) -> "BitPlan":
        """Build a plan from an integer tensor [L, W]."""
        return cls(tuple(tuple(row) for row in bits.tolist()), window_size, made_by)

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.bits)

    @property
    def windows(self) -> int:
        """Number of windows, W."""
        return len(self.bits[0])

    def tensor(self) -> Tensor:
        """The bits as an int8 tensor [L, W]."""
        return torch.tensor(self.bits, dtype=torch.int8).reshape(self.layers, self.windows)

    def average_bits(self, metadata: bool = True) -> float:
        """Mean bits per cached element of the windows.

        With `metadata`, a quantized window also carries a 16-bit scale and offset per channel, 32 / S bits an element
        (so INT2 takes 3 bits and INT4 5 bits at S = 32). Without windows everything is 16 bit.
        """
        flat = [width for row in self.bits for width in row]
        if not flat:
            return 16.0
        extra = METADATA_BITS / self.window_size if metadata else 0.0
        return sum(width if width == 16 else width + extra for width in flat) / len(flat)

    def histogram(self) -> dict[int, float]:
        """Share of the L * W windows at each bit-width in use, widest first; the shares sum to 1 (empty if W = 0)."""
        counts = Counter(width for row in self.bits for width in row)
        return {width: counts[width] / counts.total() for width in PLAN_BITS if counts[width]}
