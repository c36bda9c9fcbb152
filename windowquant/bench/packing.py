"""What packing a prompt takes, next to its prefill and to a plain copy of the same K and V."""

from functools import partial
from typing import Any

import torch
from torch import nn

from windowquant.bench.shapes import TextShape
from windowquant.bench.synthetic import AFTER, BEFORE, ids_of, sharing, stand_in_sensitivity
from windowquant.bench.timing import summary
from windowquant.cache.packed_cache import PackedCache
from windowquant.method import get_method
from windowquant.timing import timed


def measure_packing(model: nn.Module, shape: TextShape, visual: int, repeats: int) -> dict[str, Any]:
    """Seconds of a real prefill of random embeddings, and within it of the search and of packing all layers; of a copy
    of K and V of all layers; and the shares. The prefill's own seconds are without search and packing."""
    method = get_method("windowquant", sensitivity=stand_in_sensitivity(shape.layers))
    any_model: Any = sharing(model)
    weights = next(any_model.parameters())
    tokens = BEFORE + visual + AFTER
    embeds = torch.randn(1, tokens, shape.hidden, dtype=weights.dtype, device=weights.device)
    prefill, pack, search, copies = [], [], [], []
    with torch.no_grad(), method.bind(any_model) as bound:
        for _ in range(repeats + 1):
            cache = bound.new_cache({"input_ids": ids_of(1, visual)})
            assert isinstance(cache, PackedCache)
            arguments = {"inputs_embeds": embeds, bound.cache_keyword: cache, "logits_to_keep": 1}
            _, seconds = timed(weights.device, partial(any_model, **arguments))
            pack.append(cache.stats.pack_s)
            search.append(cache.stats.search_s)
            prefill.append(seconds - pack[-1] - search[-1])
            copies.append(_copy_seconds(shape, tokens, weights))
    first = 1  # the first one warms up
    packing, filling, copy = (summary(x[first:]) for x in (pack, prefill, copies))
    return {
        "visual_tokens": visual,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "prefill": filling,
        "pack": packing,
        "search": summary(search[first:]),
        "copy": copy,
        "pack_of_prefill": packing["median"] / filling["median"],
        "pack_of_copy": packing["median"] / copy["median"],
    }


def _copy_seconds(shape: TextShape, tokens: int, like: torch.Tensor) -> float:
    """Of as many plain copies of K and V [1, H, T, D] as there are layers."""
    source = torch.randn(2, 1, shape.kv_heads, tokens, shape.channels, dtype=like.dtype, device=like.device)
    target = torch.empty_like(source)
    _, seconds = timed(like.device, lambda: target.copy_(source))
    return shape.layers * seconds
