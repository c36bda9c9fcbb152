"""The control that asks whether quantization is worth it: the same KV bytes, spent on fewer frames in 16 bit."""

from dataclasses import dataclass
from typing import ClassVar

from baselines.fp16 import FP16
from windowquant.errors import UserError
from windowquant.method import Status


@dataclass(frozen=True)
class FewerFrames(FP16):
    """Of n frames a video, round(n * equal_bits / 16) are shown, at least one, and everything stays in 16 bit.

    The fewer frames are sampled from the whole video as the n would be: frame i is the middle of the i-th of as many
    equal parts. They go through vision tower and prefill alone, so that visual tokens are dropped before the language
    model, and their K and V take as many bytes as those of all n at `equal_bits` an element (scales included; 5 is
    INT4 per window and channel). It is an evaluation that shows them (`windowquant.harness`); elsewhere, give the
    processor fewer frames yourself.

    Raises UserError unless equal_bits is above 0 and 16 at most.
    """

    equal_bits: float = 5.0

    name: ClassVar[str] = "fewer_frames"
    declared: ClassVar[Status] = "control"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.equal_bits <= 16:
            raise UserError(f"equal_bits is {self.equal_bits}; set it above 0 and to 16 at most.")

    def frames(self, frames: int) -> int:
        return max(1, round(frames * self.equal_bits / 16))
