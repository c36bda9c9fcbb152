"""Layers in which every KV head orders the visual tokens by itself, and whose keys are balanced by channel (MiKV)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windowquant.cache.kv_bytes import KVBytes, tensor_bytes
from windowquant.cache.layer import LayerState, PackedCacheLayer
from windowquant.cache.origin import CacheOrigin
from windowquant.cache.packed_cache import PackedCache, Planner
from windowquant.cache.request import CacheRequest
from windowquant.cache.view import PackedView


@dataclass(frozen=True, eq=False)
class Tiers:
    """What a layer's prefill decided.

    ranks: for each row of the prompt, its visual tokens from the most important to the least, for each KV head: int64
    [H, M_b] into the row's visual tokens; None: they stay in the video's order. factors: what keys are multiplied by,
    and queries divided by, [B, H, 1, D] in the kv dtype; None: they stay as they are.
    """

    ranks: tuple[Tensor, ...] | None
    factors: Tensor | None


Decided = Callable[[int], Tiers | None]


@dataclass(frozen=True, eq=False)
class TieredState:
    """`LayerState` of such a layer, and the factors of its rows."""

    packed: LayerState
    factors: Tensor | None


@dataclass(frozen=True, eq=False)
class BalancedView:
    """A packed layer whose keys were multiplied by `factors` [B, H, 1, D]."""

    view: PackedView
    factors: Tensor

    def balanced(self, query: Tensor) -> Tensor:
        """query [B, Hq, t, D] divided by the factors of its KV heads, in its dtype."""
        shared = query.shape[1] // self.factors.shape[1]
        return (query.float() / self.factors.float().repeat_interleave(shared, 1)).to(query.dtype)


class TieredLayer(PackedCacheLayer):
    """A packed layer; see the module.

    The tokens of a head change places among the columns of visual tokens before the layer is packed, in K and in V
    alike. Attention does not notice, for whatever reads the packed layer comes after all of them and sees all of them.
    So a plan of bits by rank serves every head, and window w of it is each head's w-th most important token.
    """

    def __init__(self, index: int, request: CacheRequest, decided: Decided) -> None:
        super().__init__(index, request)
        self.factors: Tensor | None = None
        self._decided = decided

    @torch.no_grad()
    def pack_if_ready(self) -> None:
        tiers = self._decided(self.index) if self.keys is not None else None
        if tiers is not None and self.keys is not None and self.values is not None:
            times = self.keys.shape[0] // self._request.prompt.batch
            if tiers.ranks is not None:
                self.keys, self.values = (self._by_rank(x, tiers.ranks, times) for x in (self.keys, self.values))
            if tiers.factors is not None:
                self.factors = tiers.factors.to(self.keys.device).repeat_interleave(times, 0)
                self.keys = self._multiplied(self.keys)
        super().pack_if_ready()

    def _by_rank(self, x: Tensor, ranks: Sequence[Tensor], times: int) -> Tensor:
        """x [B * times, H, T, D] with the visual tokens of each row and head by rank."""
        out = x.clone()
        for row, own in enumerate(out):
            columns = self._request.prompt.visual_positions[row // times]
            source = columns[ranks[row // times]].to(x.device)
            own[:, columns.to(x.device)] = x[row].take_along_dim(source[..., None], 1)
        return out

    def _multiplied(self, keys: Tensor) -> Tensor:
        assert self.factors is not None
        return (keys.float() * self.factors.float()).to(keys.dtype)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See `PackedCacheLayer.update`; once packed, a layer with factors answers with a `BalancedView`."""
        self.pack_if_ready()
        if self.stored is None or self.factors is None:
            return super().update(key_states, value_states)
        self._match_rows(key_states.shape[0], self.stored.kept.k.shape[0])
        view, _ = super().update(self._multiplied(key_states), value_states)
        found = BalancedView(view, self.factors)
        return found, found

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        if self.factors is not None:
            self.factors = self.factors.index_select(0, beam_idx.to(self.factors.device))

    def state(self) -> Any:
        return TieredState(super().state(), self.factors)

    def restore(self, state: Any) -> None:
        super().restore(state.packed)
        self.factors = state.factors

    def factor_bytes(self) -> int:
        """Bytes of the factors."""
        return 0 if self.factors is None else tensor_bytes(self.factors)

    def nbytes(self) -> KVBytes:
        """Bytes held, by kind; the factors are among the scales."""
        return super().nbytes() + KVBytes(scale_zero=self.factor_bytes())


class TieredCache(PackedCache):
    """A packed cache of such layers."""

    layers: list[TieredLayer]

    def __init__(
        self,
        request: CacheRequest,
        planner: Planner,
        layers: int,
        origin: Callable[[], CacheOrigin],
        pixels: Mapping[str, str],
        decided: Decided,
    ) -> None:
        """decided: what is known of a layer, None before its prefill is complete. The rest: see `PackedCache`."""
        super().__init__(request, planner, layers, origin, pixels)
        self.layers = [TieredLayer(index, request, decided) for index in range(layers)]

    def predicted_nbytes(self) -> int:
        return super().predicted_nbytes() + sum(layer.factor_bytes() for layer in self.layers)
