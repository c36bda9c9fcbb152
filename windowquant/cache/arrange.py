"""Where the tokens of one layer go: which columns into which segment, which stay in 16 bit (paper, Algorithm 2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.cache.recipe import Recipe
from windowquant.core.reorder import grouping, in_place
from windowquant.models.prompt import Prompt


@dataclass(frozen=True, eq=False)
class SegmentPlace:
    """Windows that are stored together: the bits of their K and of their V, their indices, and their columns.

    columns: int64 [B, W, S]; -1 throughout a window that a row does not have.
    """

    k_bits: int
    v_bits: int
    windows: tuple[int, ...]
    columns: Tensor


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Stored order of the first `length` columns of a layer; CPU tensors of int64.

    segments: windows of which K or V is quantized, widest codes first, or all windows in runs if they stay in place.
    kept: [B, T16] the other columns, which stay in 16 bit, ascending, with -1 in front where a row has fewer of them
    than another. kept_visual: how many of them, over all rows, are visual.
    """

    length: int
    segments: tuple[SegmentPlace, ...]
    kept: Tensor
    kept_visual: int

    def order(self) -> Tensor:
        """Column of every stored token, [B, T], in stored order; -1 marks an empty slot."""
        return torch.cat([*(place.columns.flatten(1) for place in self.segments), self.kept], dim=1)

    @property
    def ragged(self) -> bool:
        """Whether some row has an empty slot."""
        return bool((self.order() < 0).any())


def arrange(prompt: Prompt, recipe: Recipe, bits: tuple[int, ...], length: int) -> Arrangement:
    """Group the windows by `bits` [W or 0] and find the columns of everything among the first `length` ones.

    If windows stay in place, those of 16 bits become segments between the others, unless there are no others.
    """
    kept = torch.ones(prompt.batch, length, dtype=torch.bool)
    if recipe.drops_visual:
        visual = prompt.visual[:, :length]
        return _arrangement(prompt, (), kept & ~(_filled(visual) if recipe.drops_between else visual))
    if all(width == recipe.v_bits(width) == 16 for width in bits):
        return _arrangement(prompt, (), kept)
    columns = prompt.windows(recipe.window_size)
    groups = (grouping if recipe.reorder else in_place)(torch.tensor(bits, dtype=torch.int8))
    segments = []
    for width, start, end in groups.groups:
        v_width = recipe.v_bits(width)
        if recipe.reorder and width == v_width == 16:
            continue
        windows = groups.permutation[start:end]
        place = SegmentPlace(width, v_width, tuple(windows.tolist()), columns[:, windows])
        for row, taken in zip(kept, place.columns, strict=True):
            row[taken[taken >= 0]] = False
        segments.append(place)
    return _arrangement(prompt, tuple(segments), kept)


def _filled(visual: Tensor) -> Tensor:
    """True from the first to the last true column of each row [B, T]."""
    return (visual.cumsum(1) > 0) & (visual.flip(1).cumsum(1).flip(1) > 0)


def _arrangement(prompt: Prompt, segments: tuple[SegmentPlace, ...], kept: Tensor) -> Arrangement:
    columns = torch.full((len(kept), int(kept.sum(1).max())), -1)
    for target, row in zip(columns, kept, strict=True):
        found = row.nonzero().flatten()
        target[len(target) - len(found) :] = found
    return Arrangement(kept.shape[1], segments, columns, int((kept & prompt.visual[:, : kept.shape[1]]).sum()))
