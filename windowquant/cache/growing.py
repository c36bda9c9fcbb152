"""K and V in 16 bit that grow by a few tokens at a time without being copied each time."""

import torch
from torch import Tensor

ROOM = 8
"""Tokens allocated ahead at least; a growing buffer takes an eighth of its length if that is more."""


class GrowingKV:
    """Two buffers [B, H, capacity, D] of which the first `length` tokens are in use.

    Appending n tokens one by one copies each stored token O(1) times, since every growth is by a fixed fraction.
    """

    def __init__(self, k: Tensor, v: Tensor, expected: int = 0) -> None:
        """Start with k, v [B, H, T, D], leaving room for `expected` more tokens and a few beyond them."""
        self.length = k.shape[2]
        self._k, self._v = (_copy_into(x, self.length + expected + ROOM) for x in (k, v))

    @classmethod
    def of_buffers(cls, k: Tensor, v: Tensor, length: int) -> "GrowingKV":
        """With these buffers [B, H, capacity, D], of which the first `length` tokens are in use: no copy."""
        new = cls.__new__(cls)
        new.length, new._k, new._v = length, k, v
        return new

    @classmethod
    def of_capacity(cls, k: Tensor, v: Tensor, capacity: int) -> "GrowingKV":
        """With k, v [B, H, T, D] in use, and room for `capacity` tokens in all."""
        return cls(k, v, capacity - k.shape[2] - ROOM)

    @property
    def k(self) -> Tensor:
        """Keys in use, [B, H, length, D]: a view."""
        return self._k.narrow(2, 0, self.length)

    @property
    def v(self) -> Tensor:
        """Values in use, [B, H, length, D]: a view."""
        return self._v.narrow(2, 0, self.length)

    @property
    def rows(self) -> int:
        """B."""
        return self._k.shape[0]

    @property
    def slack(self) -> int:
        """Tokens of room left in each row."""
        return self._k.shape[2] - self.length

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Both buffers whole, room included."""
        return self._k, self._v

    def reserve(self, tokens: int) -> None:
        """Make room for so many more tokens at least; the room holds zeros, for kernels may read it."""
        if tokens > self.slack:
            self._k, self._v = (_copy_into(x, self.length + tokens) for x in (self.k, self.v))
        for x in self.tensors():
            x.narrow(2, self.length, self.slack).zero_()

    def append(self, k: Tensor, v: Tensor) -> None:
        """Add k, v [B, H, t, D] at the end, converted to the buffers' dtype."""
        count = k.shape[2]
        end = self.length + count
        if end > self._k.shape[2]:
            capacity = end + max(ROOM, end // 8)
            self._k, self._v = _copy_into(self.k, capacity), _copy_into(self.v, capacity)
        self._k.narrow(2, self.length, count).copy_(k)
        self._v.narrow(2, self.length, count).copy_(v)
        self.length = end

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens; the room stays."""
        self.length = length

    def select(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64 [B']), repeats allowed."""
        self._k, self._v = (x.index_select(0, rows.to(x.device)) for x in (self._k, self._v))


def _copy_into(x: Tensor, capacity: int) -> Tensor:
    buffer = torch.empty(*x.shape[:2], capacity, x.shape[3], dtype=x.dtype, device=x.device)
    buffer[:, :, : x.shape[2]] = x
    return buffer
