"""Hooks around each layer's attention: a request's own sensitivity (paper, equation 9), and packing."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.packed_cache import PackedCache
from windowquant.cache.request_cache import RequestCache

FindCache = Callable[[Mapping[str, Any]], RequestCache | None]
SeenHidden = Callable[[int, Tensor, Tensor, Mapping[str, Any]], None]


def watch_attention(layers: Iterable[nn.Module], seen: SeenHidden, undo: ExitStack) -> None:
    """Call `seen(layer, h_in, h_out, kwargs)` after every layer's attention, until `undo` is closed.

    h_in [B, t, C] is the layer's input and h_out the same after the attention's residual addition; kwargs are the
    layer's keyword arguments.
    """
    for index, layer in enumerate(layers):
        inputs: list[Tensor] = []

        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[Tensor] = inputs
        ) -> None:
            inputs[:] = [args[0] if args else kwargs["hidden_states"]]

        def after(
            module: nn.Module,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
            output: Any,
            inputs: list[Tensor] = inputs,
            index: int = index,
        ) -> None:
            h_in = inputs.pop()
            attended = output[0] if isinstance(output, tuple) else output
            seen(index, h_in.detach(), (h_in + attended).detach(), kwargs)

        undo.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        undo.callback(layer.self_attn.register_forward_hook(after, with_kwargs=True).remove)  # type: ignore[union-attr]


def watch_layers(layers: Iterable[nn.Module], find_cache: FindCache, undo: ExitStack) -> None:
    """While a packed cache waits for it, measure each layer's sensitivity, by which the layer is then planned."""

    def seen(index: int, h_in: Tensor, h_out: Tensor, kwargs: Mapping[str, Any]) -> None:
        cache = find_cache(kwargs)
        if isinstance(cache, PackedCache) and cache.layers[index].stored is None:
            cache.planner.learn(index, h_in, h_out, start=cache.get_seq_length(index) - h_in.shape[1])

    watch_attention(layers, seen, undo)


def pack_after_attention(layers: Iterable[nn.Module], find_cache: FindCache, undo: ExitStack) -> None:
    """Have each layer of a packed cache packed as soon as its attention is done, until `undo` is closed.

    Then nothing but the cache holds the layer's K and V any more.
    """
    for index, layer in enumerate(layers):

        def after(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, index: int = index
        ) -> None:
            cache = find_cache(kwargs)
            if isinstance(cache, PackedCache) and cache.layers[index].keys is not None:
                _pack(cache.layers[index])

        undo.callback(layer.self_attn.register_forward_hook(after, with_kwargs=True).remove)  # type: ignore[union-attr]


@torch.compiler.disable
def _pack(layer: PackedCacheLayer) -> None:
    layer.pack_if_ready()
