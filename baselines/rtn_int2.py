"""Round-to-nearest INT2 with one group per tensor, the coarsest there is."""

from dataclasses import dataclass
from typing import ClassVar

from baselines.uniform import Uniform
from windowquant.core.quantizer import Granularity


@dataclass(frozen=True)
class RtnInt2(Uniform):
    """INT2, asymmetric, one scale and offset for all heads of a layer's visual K and one pair for its visual V.

    "Visual" is what lies in whole windows; text and the tokens outside whole windows stay in 16 bit, as always.
    """

    bits_per_code: int = 2
    granularity: Granularity = "tensor"

    name: ClassVar[str] = "rtn_int2"
