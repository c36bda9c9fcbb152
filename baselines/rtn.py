"""Round-to-nearest of the visual K and V, no calibration, no exceptions: the baseline of every quantization paper."""

from dataclasses import dataclass
from typing import ClassVar

from baselines.uniform import Uniform
from windowquant.core.quantizer import Granularity, check_symmetric
from windowquant.method import Status


@dataclass(frozen=True)
class Rtn(Uniform):
    """INT8, INT4 or INT2 at any granularity, asymmetric (the paper's equations 14 to 16, or its minimum kept as it is)
    or symmetric; a variant, for the paper names RTN and says neither groups nor bits of its scales.

    granularity: "tensor" (one group for all heads of a layer's K, one for its V), "head", "channel" (one channel of one
    head over the whole video), "token" (one token in one head), "token_all" (one token over all heads), or grouped:
    "window_channel", `window_size` tokens of one channel. zero_point: "integer", "float" or "symmetric". Quantized is
    what lies in whole windows; text and the tokens outside whole windows stay in 16 bit, as always.
    """

    granularity: Granularity = "tensor"

    name: ClassVar[str] = "rtn"
    declared: ClassVar[Status] = "variant"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.zero_point == "symmetric":
            check_symmetric(self.bits_per_code)


@dataclass(frozen=True)
class RtnInt8(Rtn):
    """INT8, one scale and offset for all heads of a layer's visual K and one pair for its visual V."""

    bits_per_code: int = 8

    name: ClassVar[str] = "rtn_int8"


@dataclass(frozen=True)
class RtnInt4(Rtn):
    """INT4, one scale and offset for all heads of a layer's visual K and one pair for its visual V."""

    name: ClassVar[str] = "rtn_int4"


@dataclass(frozen=True)
class RtnInt2(Rtn):
    """INT2, one scale and offset for all heads of a layer's visual K and one pair for its visual V."""

    bits_per_code: int = 2

    name: ClassVar[str] = "rtn_int2"
