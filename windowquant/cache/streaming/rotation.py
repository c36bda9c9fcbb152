"""RoPE taken off keys before they are coded, and put on again when they are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windowquant.models.prompt import Prompt

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [..., t, D], whose channels i and i + D / 2 are a pair; cos, sin broadcastable to it."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotations of the tokens of some rows.

    angles: cos and sin, float32 [B' or 1, t, D], of rotary positions [B' or 1, t], or [P, B', t] where a token has
    several. sources: the row of the prompt that each row continues. padding: its columns before the first token.
    """

    angles: Angles
    prompt: Prompt
    sources: tuple[int, ...]
    padding: int

    def _angles(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        known = self.prompt.position_ids(self.padding + start, self.padding + stop)
        positions = torch.arange(start, stop)[None] if known is None else known[:, list(self.sources)]
        cos, sin = self.angles(positions)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def select(self, rows: Tensor) -> "Rotation":
        """The same for a batch replaced by its `rows` (int64 [B'])."""
        return replace(self, sources=tuple(self.sources[row] for row in rows.tolist()))

    def undo(self, x: Tensor, start: int) -> Tensor:
        """Tokens x [B', H, t, D] from position `start` on as they were before RoPE, float32."""
        cos, sin = self._angles(start, start + x.shape[2])
        # Some kinds of RoPE also stretch by a factor, which is undone as well.
        return rotate(x.float(), cos, -sin) / (cos.square() + sin.square())

    def redo(self, x: Tensor, start: int) -> Tensor:
        """The other way round, float32."""
        cos, sin = self._angles(start, start + x.shape[2])
        return rotate(x.float(), cos, sin)
