"""How many bytes a cache holds, and how many the formula says it should."""

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class KVBytes:
    """Bytes of K and V over all layers and rows; `total` equals the bytes of the storages that the cache holds.

    codes: packed INT8/4/2/1 codes. scale_zero: their 16-bit scales and offsets. fp16_windows: visual tokens kept in
    16 bit, those outside whole windows included. tail: text tokens, of the prompt and generated, and everything while
    the prefill is not complete. slack: room allocated for tokens to come, and empty slots of shorter rows. index: which
    column each stored token came from, held only where an attention mask needs it (padded batches).
    """

    codes: int = 0
    scale_zero: int = 0
    fp16_windows: int = 0
    tail: int = 0
    slack: int = 0
    index: int = 0

    @property
    def total(self) -> int:
        """The sum of the parts, in bytes."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: "KVBytes") -> "KVBytes":
        return KVBytes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def tensor_bytes(*tensors: Tensor) -> int:
    """Bytes of the elements of `tensors`."""
    return sum(x.numel() * x.element_size() for x in tensors)


def kv_bytes(cache: Any) -> KVBytes:
    """The breakdown of any transformers `Cache`: a packed cache's own, and all of another's K and V under `tail`."""
    own = getattr(cache, "nbytes", None)
    if own is not None:
        return own()
    held = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    return KVBytes(tail=tensor_bytes(*held))


def visual_bits(cache: Any, visual_tokens: int) -> float:
    """Bits held per element of K and V of the visual tokens (of all rows), scales included; NaN if there are none."""
    if visual_tokens == 0:
        return float("nan")
    if hasattr(cache, "visual_bits"):
        return cache.visual_bits()
    own = getattr(cache, "nbytes", None)
    if own is None:
        return 8.0 * cache.layers[0].keys.element_size()
    held, elements = own(), sum(layer.token_elements() for layer in cache.layers)
    return 8 * (held.codes + held.scale_zero + held.fp16_windows) / (visual_tokens * elements)
