"""The architectures of the stand-ins, by the name of their checkpoint's folder."""

from windowquant.errors import UserError
from windowquant.mini.architectures.architecture import Architecture, Layout
from windowquant.mini.architectures.internvl import InternVL
from windowquant.mini.architectures.llava_onevision import LlavaOnevision
from windowquant.mini.architectures.qwen2_vl import Qwen2VL

__all__ = ["ARCHITECTURES", "Architecture", "Layout", "architecture"]

ARCHITECTURES: dict[str, Architecture] = {kind.name: kind for kind in (LlavaOnevision(), Qwen2VL(), InternVL())}


def architecture(name: str) -> Architecture:
    """The architecture of a name; UserError, listing the known ones, if there is none."""
    if name not in ARCHITECTURES:
        raise UserError(f"Unknown architecture '{name}': the known ones are {', '.join(ARCHITECTURES)}.")
    return ARCHITECTURES[name]
