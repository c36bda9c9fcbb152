"""The control that tells what a model still knows of its video from the text between the frames."""

from dataclasses import dataclass, replace
from typing import ClassVar

from baselines.no_video import NoVideo
from windowquant.cache.recipe import Recipe


@dataclass(frozen=True)
class NoSpan(NoVideo):
    """K and V of every token from the first visual one to the last are discarded after prefill.

    Beyond `no_video` this takes the text between frames or images, which has read those before it ("Frame7:").
    """

    name: ClassVar[str] = "no_span"

    def recipe(self) -> Recipe:
        return replace(super().recipe(), drops_between=True)
