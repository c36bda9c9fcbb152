"""What the cache hands to attention in place of K and V once a layer is packed."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from windowquant.cache.pack import StoredLayer
from windowquant.core.packed import PackedLayer

Attend = Callable[[Tensor, PackedLayer, Tensor | None, float], Tensor]


class KVView(Protocol):
    """Stored K and V that know how to be attended to."""

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attention of query [B, Hq, t, D] over all stored tokens: [B, Hq, t, D] in its dtype.

        mask: bool or additive [B or 1, 1, t, columns] in the prompt's columns; None: causal, without padding.
        """


@dataclass(eq=False)
class PackedView:
    """A packed layer with the kernel to attend with; one object for all steps, told of each by its `columns`.

    stored: the layer. order: gives the column of every stored token, int64 [B, T], -1 for an empty slot. ragged: there
    are empty slots. columns: how many columns the layer has seen.
    """

    stored: StoredLayer
    order: Callable[[], Tensor]
    ragged: bool
    columns: int
    attend: Attend

    def __post_init__(self) -> None:
        self._coded = sum(len(s.windows) * s.k.shape[3] for s in self.stored.segments)
        self._device = self.stored.kept.k.device

    def packed(self, ordered: bool) -> PackedLayer:
        """The container kernels take.

        Without a mask and without empty slots a kernel reads no more of `order` than its shape, so unless it is asked
        for (`ordered`) a placeholder of that shape stands in, which takes no memory.
        """
        kept = self.stored.kept
        order = self.order() if ordered else _zero(self._device).expand(kept.rows, self._coded + kept.length)
        return PackedLayer(kept.k, kept.v, self.stored.segments, order)


@lru_cache
def _zero(device: torch.device) -> Tensor:
    """int64 [1, 1], one a device: no layer holds bytes of its own for it."""
    return torch.zeros(1, 1, dtype=torch.int64, device=device)
