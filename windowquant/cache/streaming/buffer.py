"""A first-in, first-out buffer along the third dimension of a tensor, without a copy for each token."""

import torch
from torch import Tensor

_ROOM = 8  # entries allocated ahead at least; a growing buffer takes an eighth of its length if that is more


class TokenBuffer:
    """Entries [B, H, n, ...] in order: new ones join at the end, old ones leave at the front.

    Appending entries one by one copies each stored entry O(1) times: a full buffer grows by a fixed fraction. What
    `view` gave stays as it was until the next `append`, whatever leaves in between.
    """

    def __init__(self, like: Tensor, expected: int = 0) -> None:
        """An empty buffer for entries of the shape, dtype and device of `like` [B, H, any, ...], `expected` of them."""
        self._data = like.new_empty(*like.shape[:2], expected, *like.shape[3:])
        self._start = self._end = 0

    @classmethod
    def of(cls, x: Tensor) -> "TokenBuffer":
        """A buffer that holds a copy of x [B, H, t, ...]."""
        buffer = cls(x, x.shape[2])
        buffer.append(x)
        return buffer

    @property
    def length(self) -> int:
        """Entries held."""
        return self._end - self._start

    def append(self, x: Tensor) -> None:
        """Add x [B, H, t, ...] at the end, converted to the buffer's dtype."""
        if self._start == self._end:
            self._start = self._end = 0
        if self._end + x.shape[2] > self._data.shape[2]:
            self._move(self.length + x.shape[2])
        self._data[:, :, self._end : self._end + x.shape[2]] = x
        self._end += x.shape[2]

    def _move(self, needed: int) -> None:
        """Into memory of its own, so that earlier views of the old one keep their values."""
        kept = self.view()
        room = 0 if self._data.shape[2] == 0 else max(_ROOM, needed // 8)
        data = self._data.new_empty(*kept.shape[:2], needed + room, *kept.shape[3:])
        data[:, :, : kept.shape[2]] = kept
        self._data, self._start, self._end = data, 0, kept.shape[2]

    def drop(self, n: int) -> None:
        """Let the `n` oldest entries go, and their memory too once less than half of all is in use."""
        self._start += n
        if 2 * self.length < self._data.shape[2]:
            self._move(self.length)

    def truncate(self, n: int) -> None:
        """Keep the `n` oldest entries only; the memory stays."""
        self._end = self._start + n

    def view(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Entries `start` to `stop` (all by default), counted from the oldest: a view [B, H, stop - start, ...]."""
        stop = self.length if stop is None else stop
        return self._data[:, :, self._start + start : self._start + stop]

    def select(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64 [B']), repeats allowed."""
        self._data = self._data.index_select(0, rows.to(self._data.device))

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry in all rows."""
        shape = self._data.shape
        return torch.Size((*shape[:2], *shape[3:])).numel() * self._data.element_size()

    @property
    def slack_bytes(self) -> int:
        """Bytes of memory that holds no entry: room for later ones, and what left but was not yet overwritten."""
        return self._data.numel() * self._data.element_size() - self.length * self.entry_bytes
