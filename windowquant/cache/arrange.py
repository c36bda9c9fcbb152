"""Where the tokens of one layer go: which columns into which segment, which stay in 16 bit (paper, Algorithm 2).

In NumPy, whose operations on arrays of this size cost a fraction of torch's: it happens in every layer.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowquant.cache.recipe import Recipe
from windowquant.core.reorder import grouping, in_place
from windowquant.models.prompt import Prompt


@dataclass(frozen=True, eq=False)
class SegmentPlace:
    """Windows that are stored together: the bits of their K and of their V, and their indices."""

    k_bits: int
    v_bits: int
    windows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Stored order of the first `length` columns of a layer.

    segments: windows of which K or V is quantized, widest codes first, or all windows in runs if they stay in place.
    window_size: tokens of each. order: column of every stored token, int64 [B, T] on the CPU: the windows of each
    segment, then the other columns, which stay in 16 bit, ascending. -1 marks an empty slot: throughout a window that
    a row does not have, and before the columns of 16 bit where a row has fewer of them than another. kept: how many
    columns of `order` those of 16 bit are; over all rows, `kept_visual` of them are visual and `empty` are empty slots.
    """

    length: int
    segments: tuple[SegmentPlace, ...]
    window_size: int
    order: Tensor
    kept: int
    kept_visual: int
    empty: int

    @property
    def ragged(self) -> bool:
        """Whether some row has an empty slot; a single one has none."""
        return len(self.order) > 1 and bool((self.order < 0).any())

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
        """For the first `length` columns of `prompt`; every window is among them."""
        self._prompt, self._recipe, self._length = prompt, recipe, length
        self._visual: NDArray[np.bool_] = prompt.visual[:, :length].numpy()

    def arrange(self, bits: tuple[int, ...]) -> Arrangement:
        """Group the windows by `bits` [W or 0] and find the columns of everything else.

        If windows stay in place, those of 16 bits become segments between the others, unless there are no others.
        """
        recipe = self._recipe
        if recipe.drops_visual:
            return self._stored((), None, ~(_filled(self._visual) if recipe.drops_between else self._visual))
        v_bits = {width: recipe.v_bits(width) for width in set(bits)}
        if not v_bits or (v_bits.get(16) == 16 and len(v_bits) == 1):
            return self._stored((), None, np.ones_like(self._visual))
        groups = (grouping if recipe.reorder else in_place)(bits)
        order = groups.permutation
        skip = bits.count(16) if recipe.reorder and v_bits.get(16) == 16 else 0  # they are the first ones
        segments = tuple(
            SegmentPlace(width, v_bits[width], order[start:end]) for width, start, end in groups.groups if start >= skip
        )
        windows = np.array(order[skip:])
        others = self._all_windows.copy()
        others[windows] = False
        return self._stored(segments, windows, others[self._window_of])

    @cached_property
    def _windows(self) -> NDArray[np.int64]:
        """Columns of every window, [B, W, S]."""
        return self._prompt.windows(self._recipe.window_size).numpy()

    @cached_property
    def _window_of(self) -> NDArray[np.int64]:
        """The window that each column is in, [B, T]; W where it is in none."""
        rows, windows, _ = self._windows.shape
        found = np.full((rows, self._length), windows)
        row, window, token = (self._windows >= 0).nonzero()
        found[row, self._windows[row, window, token]] = window
        return found

    @cached_property
    def _all_windows(self) -> NDArray[np.bool_]:
        """True for each window and, last, for what is in none, [W + 1]."""
        return np.ones(self._windows.shape[1] + 1, np.bool_)

    @cached_property
    def _visual_count(self) -> int:
        return int(np.count_nonzero(self._visual))

    def _stored(
        self, segments: tuple[SegmentPlace, ...], windows: NDArray[np.int64] | None, kept: NDArray[np.bool_]
    ) -> Arrangement:
        """windows: those of all segments. kept: which columns stay in 16 bit, [B, T]."""
        columns, empty = _columns(kept)
        if windows is None:
            order = columns
        else:
            order = np.concatenate((self._windows.take(windows, 1).reshape(len(kept), -1), columns), 1)
        # Only visual columns are in windows.
        visual = 0 if self._recipe.drops_visual else self._visual_count - kept.size + columns.size - empty
        size = self._recipe.window_size
        return Arrangement(self._length, segments, size, torch.from_numpy(order), columns.shape[1], visual, empty)


def _columns(kept: NDArray[np.bool_]) -> tuple[NDArray[np.int64], int]:
    """The true columns of each row [B, T], ascending, with -1 in front where a row has fewer than another; how many."""
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
