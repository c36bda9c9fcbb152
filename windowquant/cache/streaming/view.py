"""What the streaming cache hands to attention: the tokens of every group of rows, at one moment."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.kernels.piecewise import MixedTokens, attend


@dataclass(frozen=True, eq=False)
class GroupView:
    """Rows (int64 [B']) whose first `padding` columns hold no token, with their K and V."""

    rows: Tensor
    padding: int
    keys: MixedTokens
    values: MixedTokens

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attention of all rows' query [B, Hq, t, D] and mask [B or 1, 1, t, columns], for these rows only."""
        if len(self.rows) < query.shape[0]:
            query = query.index_select(0, self.rows)
            mask = mask.index_select(0, self.rows) if mask is not None and mask.shape[0] > 1 else mask
        if mask is not None:
            mask = mask[..., self.padding :]
        return attend(query, self.keys, self.values, mask, scaling)


@dataclass(frozen=True, eq=False)
class StreamView:
    """A layer at one moment, in groups of rows."""

    groups: tuple[GroupView, ...]

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """Attention of query [B, Hq, t, D] over all stored tokens: [B, Hq, t, D].

        mask: bool or additive [B or 1, 1, t, columns] in the prompt's columns; None: causal, no padding.
        """
        if len(self.groups) == 1:
            return self.groups[0].attend(query, mask, scaling)
        out = torch.empty_like(query)
        for group in self.groups:
            out.index_copy_(0, group.rows, group.attend(query, mask, scaling))
        return out
