"""Packed layers in steps of fixed shapes, in which the device alone knows how many tokens there are."""

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.request_layer import RequestLayer
from windowquant.cache.view import Attend
from windowquant.core.packed import PackedLayer, Segment


class StaticLayer(RequestLayer):
    """Stands in for a packed layer while tokens come one at a time, and hands itself to attention.

    It writes into the layer's own 16-bit buffers, which are given room for all that is to come, and attention takes
    them whole: `order` is -1 where there is no token yet, and for padding, so that no step needs a mask. Neither a
    shape nor a number on the host changes from step to step.
    """

    def __init__(self, layer: PackedCacheLayer, at: Tensor, tokens: int, padding: Tensor, attend: Attend) -> None:
        """at: int64 [1], tokens written so far, which the caller counts; tokens: how many there will be at most.

        padding: bool [B, columns of the prompt], True where attention must not look.
        """
        super().__init__()
        state = layer.state()
        kept = state.stored.kept
        kept.reserve(tokens)
        self.is_initialized = True
        self.segments: tuple[Segment, ...] = state.stored.segments
        self.backend = attend
        self._k, self._v = kept.tensors()
        self._at, self._seen, self._kept = at, state.seen, kept.length
        order = layer.order()
        hidden = padding.gather(1, order.clamp(0, padding.shape[1] - 1)) & (order < padding.shape[1])
        self._stored = order.shape[1]
        self._order = order.new_full((order.shape[0], self._stored + kept.slack), -1)
        self._order[:, : self._stored] = order.masked_fill(hidden, -1)
        self._number = next(_numbers)
        _layers[self._number] = self

    def writes_into(self, layer: PackedCacheLayer) -> bool:
        """Whether the layer's 16-bit buffers are still the ones that this was made with."""
        return layer.state().stored.kept.tensors()[0] is self._k

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Everything is there already."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple["StaticLayer", "StaticLayer"]:
        """Take in K and V [B, H, 1, D] of the next column."""
        place, column = self._at + self._kept, self._at + self._seen
        self._k.index_copy_(2, place, key_states.to(self._k.dtype))
        self._v.index_copy_(2, place, value_states.to(self._v.dtype))
        self._order.index_copy_(1, self._at + self._stored, column.expand(len(self._order), 1))
        return self, self

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """See `KVView`; there is never a mask."""
        return attend_static(query, self._k, self._v, self._order, self._number, scaling)


_numbers = count()
_layers: WeakValueDictionary[int, StaticLayer] = WeakValueDictionary()


@torch.library.custom_op("windowquant::attend_static", mutates_args=())
def attend_static(query: Tensor, k: Tensor, v: Tensor, order: Tensor, layer: int, scaling: float) -> Tensor:
    """Attention over the packed windows of a `StaticLayer`, by its number, and over the 16-bit block k, v.

    An operator of its own, so that torch.compile has one graph a step and looks into no kernel. Codes do not change
    while a layer lives; whatever does is an argument.
    """
    static = _layers[layer]
    return static.backend(query, PackedLayer(k, v, static.segments, order), None, scaling)


@attend_static.register_fake
def _(query: Tensor, k: Tensor, v: Tensor, order: Tensor, layer: int, scaling: float) -> Tensor:
    return query.new_empty(query.shape)
