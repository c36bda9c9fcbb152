"""One request as the rest of the package sees it: which of its tokens are visual, which are text, which are padding."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowquant.core.windows import window_count
from windowquant.errors import UserError


@dataclass(frozen=True, eq=False)
class Prompt:
    """The tokens of a request, on the CPU.

    input_ids: int64 [B, T]. attended: bool [B, T], False on padding. visual: bool [B, T], True where the language model
    receives a vision feature instead of a word embedding (separators that the projector emits included). positions:
    rotary positions int64 [P, B, T] where the model does not simply count its tokens, else None.
    """

    input_ids: Tensor
    attended: Tensor
    visual: Tensor
    positions: Tensor | None = None
    _windows: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    @property
    def batch(self) -> int:
        """Number of requests, B."""
        return self.input_ids.shape[0]

    @property
    def length(self) -> int:
        """Number of columns, T, padding included."""
        return self.input_ids.shape[1]

    @property
    def padded(self) -> bool:
        """Whether any column of any row is padding."""
        return not bool(self.attended.all())

    @cached_property
    def visual_positions(self) -> list[Tensor]:
        """Columns of the visual tokens, ascending: one int64 [M_b] per row."""
        return [row.nonzero().flatten() for row in self.visual]

    @cached_property
    def text_positions(self) -> list[Tensor]:
        """Columns of the text tokens (neither visual nor padding), ascending: one int64 [N_b] per row."""
        return [row.nonzero().flatten() for row in self.attended & ~self.visual]

    @cached_property
    def visual_end(self) -> int:
        """The column after the last visual token of any row; 0 without visual tokens."""
        columns = self.visual.any(0).nonzero().flatten()
        return int(columns[-1]) + 1 if len(columns) else 0

    def position_ids(self, start: int, stop: int, times: int = 1) -> Tensor | None:
        """Rotary positions of columns `start` to `stop`, every row `times` times in place: int64 [P, B * times, t].

        Columns after the prompt's end are text and count on from its last. None where the model counts by itself.
        """
        if self.positions is None:
            return None
        known = self.positions[..., start:stop]
        later = torch.arange(max(start, self.length), max(stop, self.length)) - self.length + 1
        return torch.cat([known, self.positions[..., -1:] + later], dim=-1).repeat_interleave(times, dim=1)

    def windows(self, window_size: int) -> NDArray[np.int64]:
        """Columns of every window, [B, W, S] with W the most windows of any row; -1 where a row has fewer.

        Windows are cut from a row's visual tokens in order (paper, equations 4 to 7); the last M mod S are in none.
        Warns, once a request, if no row has a whole window although there are visual tokens.
        """
        if window_size not in self._windows:
            self._windows[window_size] = self._cut(window_size)
        return self._windows[window_size]

    def _cut(self, window_size: int) -> NDArray[np.int64]:
        counts = [window_count(len(row), window_size) for row in self.visual_positions]
        columns = np.empty((self.batch, max(counts), window_size), np.int64)
        columns.fill(-1)
        for row, positions, count in zip(columns, self.visual_positions, counts, strict=True):
            row[:count] = positions.numpy()[: count * window_size].reshape(count, window_size)
        return columns

    def repeat(self, times: int) -> "Prompt":
        """The prompt with every row repeated `times` times in place, as `generate` does for beams."""
        if times == 1:
            return self
        ids, attended, visual = (x.repeat_interleave(times, 0) for x in (self.input_ids, self.attended, self.visual))
        return Prompt(ids, attended, visual, self.position_ids(0, self.length, times))


@dataclass(frozen=True, eq=False)
class Embeddings:
    """What enters the language model, split by kind: per row visual [M_b, C] and text [N_b, C], the model's dtype."""

    visual: list[Tensor]
    text: list[Tensor]


def require_ids(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """`input_ids` [B, T] and the attention mask (bool [B, T], all True if absent) of processor outputs, on the CPU."""
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.numel() == 0:
        raise UserError("The inputs hold no input_ids of shape [batch, tokens]; pass what the processor returned.")
    mask = inputs.get("attention_mask")
    attended = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    if attended.shape != ids.shape:
        raise UserError(
            f"attention_mask has shape {list(attended.shape)} and input_ids {list(ids.shape)}; give both the same."
        )
    return ids.cpu(), attended.cpu()
