"""What every cache of ours answers, however it stores K and V."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Cache

from windowquant.cache.kv_bytes import KVBytes

if TYPE_CHECKING:
    from windowquant.cache.packed_cache import RequestStats


class RequestCache(Cache):
    """A cache of one request or batch of requests; made by `Bound.new_cache`, used once.

    request: has the `prompt` that the cache belongs to.
    """

    request: Any

    def observe(self, embeds: Tensor) -> None:
        """Take in the embeddings [B or k * B, t, C] of the next t columns as they enter the language model."""

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
