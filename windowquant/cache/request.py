"""What the layers of one cache share."""

from collections.abc import Callable
from dataclasses import dataclass, field

from windowquant.cache.arrange import Arrangement, Arranger
from windowquant.cache.recipe import Recipe
from windowquant.cache.view import Attend
from windowquant.models.prompt import Prompt


@dataclass(eq=False)
class CacheRequest:
    """One request: its tokens, how to store them, and where the plan comes from.

    bits: bits of each window of a layer, None while unknown. attend: the kernel. check_usable: raises UserError if the
    cache may not be used now (the method is no longer bound to the model).
    """

    prompt: Prompt
    recipe: Recipe
    bits: Callable[[int], tuple[int, ...] | None]
    attend: Attend
    check_usable: Callable[[], None]
    _arranger: tuple[object, Arranger] | None = field(default=None, init=False)
    _latest: tuple[object, Arrangement] | None = field(default=None, init=False)

    def arrangement(self, bits: tuple[int, ...], length: int, repeats: int) -> Arrangement:
        """Where the first `length` columns go, every row `repeats` times; equal neighbouring layers share the work."""
        arranger = self._arranger_of(length, repeats)
        key = (arranger, bits)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, arranger.arrange(bits)
        return self._latest[1]

    def _arranger_of(self, length: int, repeats: int) -> Arranger:
        """What does not depend on the layer."""
        key = (self.prompt, length, repeats)
        if self._arranger is None or self._arranger[0] != key:
            self._arranger = key, Arranger(self.prompt.repeat(repeats), self.recipe, length)
        return self._arranger[1]
