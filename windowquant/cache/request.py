"""What the layers of one cache share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from windowquant.cache.arrange import Arrangement, Arranger
from windowquant.cache.recipe import Recipe
from windowquant.cache.view import Attend
from windowquant.models.prompt import Prompt

_AHEAD = 2**16  # columns that are arranged at a time, half a mebibyte of them


@dataclass(eq=False)
class CacheRequest:
    """One request: its tokens, how to store them, and where the plan comes from.

    bits: bits of each window of a layer, None while unknown. attend: the kernel. check_usable: raises UserError if the
    cache may not be used now (the method is no longer bound to the model). layers: how many there are.
    """

    prompt: Prompt
    recipe: Recipe
    bits: Callable[[int], tuple[int, ...] | None]
    attend: Attend
    check_usable: Callable[[], None]
    layers: int = 1
    _arranger: tuple[object, Arranger] | None = field(default=None, init=False)
    _arranged: dict[tuple[int, ...], Arrangement] = field(default_factory=dict, init=False)

    def arrangement(self, layer: int, length: int, repeats: int) -> Arrangement:
        """Where the first `length` columns of a layer go, every row `repeats` times; equal layers share the work.

        Those of the next layers are made along with it if they are small: one after the other, all but the first take
        a third of the time.
        """
        arranger, bits = self._arranger_of(length, repeats), self.bits(layer)
        assert bits is not None
        if bits not in self._arranged:
            count = max(1, _AHEAD // max(1, length * repeats * self.prompt.batch))
            rows = (self.bits(index) for index in range(layer + 1, min(self.layers, layer + count)))
            self._arranged = {row: arranger.arrange(row) for row in dict.fromkeys((bits, *rows)) if row is not None}
        return self._arranged[bits]

    def _arranger_of(self, length: int, repeats: int) -> Arranger:
        """What does not depend on the layer."""
        key = (self.prompt, length, repeats)
        if self._arranger is None or self._arranger[0] != key:
            self._arranger = key, Arranger(self.prompt.repeat(repeats), self.recipe, length)
            self._arranged = {}
        return self._arranger[1]
