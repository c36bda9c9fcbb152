"""What every cache of ours answers, however it stores K and V."""

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from windowquant.cache.kv_bytes import KVBytes
from windowquant.cache.origin import CacheOrigin
from windowquant.models import Prompt

if TYPE_CHECKING:
    from windowquant.cache.packed_cache import RequestStats


class RequestCache(Cache):
    """A cache of one request or batch of requests; made by `Bound.new_cache` or `Bound.encode`.

    It serves one video (or set of images): `Bound.resume` takes it back to another question about them, and `save`
    keeps it for another day.

    request: has the `prompt` that the cache belongs to. origin: tells model and method, when the cache is written.
    pixels: prints of what the prompt shows.
    """

    request: Any
    origin: Callable[[], CacheOrigin]
    pixels: Mapping[str, str]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take K and V [B, H, t, D] of the next t columns into a layer; what comes back is for our attention."""
        layer = self.layers[layer_idx]
        if torch.compiler.is_compiling():  # its lengths would be compiled in
            return _update_untraced(layer, key_states, value_states)
        return layer.update(key_states, value_states)

    def observe(self, embeds: Tensor) -> None:
        """Take in the embeddings [B or k * B, t, C] of the next t columns as they enter the language model."""

    @property
    def packed(self) -> bool:
        """Whether every layer stores its K and V as the method says; before that they are in full precision."""
        raise NotImplementedError

    def rows_per_layer(self) -> list[Any]:
        """What each layer was told of the plan; see `saved.FixedPlan`."""
        raise NotImplementedError

    def mark(self) -> None:
        """The cache holds the video and nothing after it: prepare to come back here."""

    def way_back(self, columns: int) -> int:
        """How many columns, `columns` at most, it can be taken back to; UserError if it cannot be."""
        raise NotImplementedError

    def go_back(self, columns: int, prompt: Prompt) -> None:
        """Keep the first `columns` columns, one row a prompt, and expect `prompt` to go on from there.

        `columns` is an answer of `way_back`, and `prompt` must be the same up to there.
        """
        raise NotImplementedError

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to one safetensors file, for `Bound.load_cache`; it appears whole or not at all.

        It holds codes, scales and offsets, 16-bit tokens (those after the video, too), the plan if there is one, and
        what tells its model, method, prompt and video from others. Raises UserError before the prefill is complete.
        """
        from windowquant.cache.saved import write

        write(self, path)

    def nbytes(self) -> KVBytes:
        """Bytes held now, by kind; the sum equals the bytes of the storages."""
        raise NotImplementedError

    def predicted_nbytes(self) -> int:
        """Bytes by formula, without room for tokens to come; 0 before anything is quantized."""
        raise NotImplementedError

    @property
    def stats(self) -> "RequestStats":
        """What planning and packing took and decided so far."""
        raise NotImplementedError


@torch.compiler.disable
def _update_untraced(layer: Any, k: Tensor, v: Tensor) -> tuple[Any, Any]:
    return layer.update(k, v)
