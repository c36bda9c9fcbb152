"""Where the tokens of one layer go: which columns into which segment, which stay in 16 bit (paper, Algorithm 2).

It happens in every layer, right after a part of the model that left nothing of this code in the processor's caches: a
few operations of NumPy, and no tensor before one is needed.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowquant.cache.recipe import Recipe
from windowquant.core.plan import PLAN_BITS
from windowquant.core.reorder import grouping, in_place
from windowquant.models.prompt import Prompt


@dataclass(frozen=True, eq=False)
class SegmentPlace:
    """Windows that are stored together: the bits of their K and of their V, and their indices."""

    k_bits: int
    v_bits: int
    windows: tuple[int, ...]


@dataclass(eq=False)
class Arrangement:
    """Stored order of the first columns of a layer.

    segments: windows of which K or V is quantized, widest codes first, or all windows in runs if they stay in place.
    window_size: tokens of each. columns: that of every stored token, int64 [B, T]: the windows of each segment, then
    the other columns, which stay in 16 bit, ascending. -1 marks an empty slot: throughout a window that a row does not
    have, and before the columns of 16 bit where a row has fewer of them than another. kept: how many columns of a row
    those of 16 bit are; over all rows, `kept_visual` of them are visual and `empty` are empty slots.
    """

    segments: tuple[SegmentPlace, ...]
    window_size: int
    columns: NDArray[np.int64]
    kept: int
    kept_visual: int
    empty: int

    @property
    def ragged(self) -> bool:
        """Whether some row has an empty slot; a single one has none."""
        return len(self.columns) > 1 and bool((self.columns < 0).any())

    @cached_property
    def order(self) -> Tensor:
        """`columns` as a tensor on the CPU."""
        return torch.from_numpy(self.columns)

    def segment_columns(self) -> tuple[Tensor, ...]:
        """Columns of the windows of each segment, int64 [B, W, S]."""
        counts = [len(place.windows) * self.window_size for place in self.segments]
        parts = self.order[:, : sum(counts)].split(counts, dim=1) if counts else ()
        return tuple(part.unflatten(1, (-1, self.window_size)) for part in parts)

    def kept_columns(self) -> Tensor:
        """Columns of what stays in 16 bit, int64 [B, T16]."""
        return self.order[:, self.order.shape[1] - self.kept :]


class Arranger:
    """Arranges the layers of one cache, which differ in their bits only."""

    def __init__(self, prompt: Prompt, recipe: Recipe, length: int) -> None:
        """For the first `length` columns of `prompt`; all its visual columns are among them."""
        self._prompt, self._recipe, self._length = prompt, recipe, length
        self._v_bits = {width: recipe.v_bits(width) for width in PLAN_BITS}

    def arrange(self, bits: tuple[int, ...]) -> Arrangement:
        """Group the windows by `bits` [W or 0] and find the columns of everything else.

        If windows stay in place, those of 16 bits become segments between the others, unless there are no others.
        """
        size, v_bits, plain = self._recipe.window_size, self._v_bits, self._v_bits[16] == 16
        if self._recipe.drops_visual:
            columns, empty = _columns(self._texts())
            return Arrangement((), size, columns, columns.shape[1], 0, empty)
        if plain and bits.count(16) == len(bits):
            columns, empty = _columns(np.ones((self._prompt.batch, self._length), np.bool_))
            return Arrangement((), size, columns, columns.shape[1], self._visual, empty)
        groups = (grouping if self._recipe.reorder else in_place)(bits)
        order = groups.permutation
        skip = bits.count(16) if self._recipe.reorder and plain else 0  # they are the first ones
        segments = tuple(
            SegmentPlace(width, v_bits[width], order[start:end]) for width, start, end in groups.groups if start >= skip
        )
        windows, is_kept = np.array(order[skip:], np.int64), np.empty(len(bits) + 1, np.bool_)
        is_kept.fill(True)
        is_kept[windows] = False
        kept, empty = _columns(is_kept[self._window_of])
        inside = self._windows.take(windows, 1).reshape(len(kept), -1)
        visual = self._visual - len(kept) * (self._length - kept.shape[1]) - empty  # only visual columns are in windows
        return Arrangement(segments, size, np.concatenate((inside, kept), 1), kept.shape[1], visual, empty)

    @cached_property
    def _windows(self) -> NDArray[np.int64]:
        """Columns of every window, [B, W, S]."""
        return self._prompt.windows(self._recipe.window_size)

    @cached_property
    def _window_of(self) -> NDArray[np.int64]:
        """The window that each column is in, [B, T]; W where it is in none."""
        rows, windows, size = self._windows.shape
        found = np.empty((rows, self._length + 1), np.int64)  # the last one is that of empty slots, -1
        found.fill(windows)
        names = np.arange(windows * size).reshape(windows, size) // size
        for row, columns in zip(found, self._windows, strict=True):
            row[columns] = names
        return found[:, :-1]

    @cached_property
    def _visual(self) -> int:
        """Visual tokens of all rows."""
        return sum(map(len, self._prompt.visual_positions))

    def _texts(self) -> NDArray[np.bool_]:
        """What stays if visual tokens are dropped, [B, T]."""
        visual = self._prompt.visual.numpy()[:, : self._length]
        return ~(_filled(visual) if self._recipe.drops_between else visual)


def _columns(kept: NDArray[np.bool_]) -> tuple[NDArray[np.int64], int]:
    """The true columns of each row [B, T], ascending, with -1 in front where a row has fewer than another.

    And how often that is so.
    """
    rows, length = kept.shape
    found = kept.ravel().nonzero()[0]
    if rows == 1:
        return found.reshape(1, -1), 0
    counts = kept.sum(1)
    columns = np.full((rows, int(counts.max())), -1)
    columns[np.arange(columns.shape[1]) >= columns.shape[1] - counts[:, None]] = found % length
    return columns, columns.size - found.size


def _filled(visual: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """True from the first to the last true column of each row [B, T]."""
    until = np.logical_or.accumulate(visual, axis=1)
    return until & np.logical_or.accumulate(visual[:, ::-1], axis=1)[:, ::-1]
