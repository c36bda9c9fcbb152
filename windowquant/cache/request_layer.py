"""What every cache layer of ours answers to transformers, however it stores K and V."""

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from windowquant.errors import UserError


class RequestLayer(CacheLayerMixin):
    """A layer of a cache that belongs to one prompt, and counts the columns it has seen (`_seen`)."""

    is_sliding = False
    _seen: int

    def rows(self) -> int:
        """Rows held now; UserError before the prompt is complete."""
        raise NotImplementedError

    def _match_rows(self, rows: int, held: int) -> None:
        """Before an update of `rows` rows where `held` are held: repeat these in place; UserError if that won't do."""
        if rows % held:
            raise UserError(
                f"The cache holds {held} rows (beams, or several answers) and is used with {rows}; take it back to one "
                "row a prompt with resume(cache, inputs)."
            )
        if rows > held:
            self.batch_repeat_interleave(rows // held)

    def get_seq_length(self) -> int:
        """Columns seen so far, those that are no longer stored included."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns after the next `query_length` ones, offset of the first)."""
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: the layer grows without limit."""
        return -1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times in place."""
        self.reorder_cache(torch.arange(self.rows()).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the given rows only."""
        self.reorder_cache(indices)

    def reset(self) -> None:
        raise UserError("The cache belongs to one prompt; make a new one with new_cache(inputs) for the next.")
