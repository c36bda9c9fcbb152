"""The search for clips of quantization ranges by what they do to the output of attention (SKVQ's offline search)."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

CLIPS = tuple(round(1 - 0.02 * step, 2) for step in range(26))  # 1.0 to 0.5


@dataclass(frozen=True, eq=False)
class DrawnAttention:
    """Attention of one layer among the tokens that were drawn of each calibration prompt.

    query [n, Hq, D], key, unrotated_key, value [n, H, D]: see `calibrate.states.States`, any dtype. sample: which
    prompt each token is from, int [n]; within a prompt tokens are in order. A token attends to the drawn tokens of its
    prompt up to itself, so that this stands for the attention over whole prompts.
    """

    query: Tensor
    key: Tensor
    unrotated_key: Tensor
    value: Tensor
    sample: Tensor

    def output(self, key: Tensor, value: Tensor) -> Tensor:
        """Attention output [n, Hq, D] of the drawn queries over K and V [n, H, D], float32."""
        shared = self.query.shape[1] // key.shape[1]
        q, k, v = (x.float().transpose(0, 1) for x in (self.query, key, value))  # [heads, n, D]
        k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
        seen = (self.sample[:, None] == self.sample) & torch.ones(len(q[0]), len(q[0]), dtype=torch.bool).tril()
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)

    @cached_property
    def _exact(self) -> Tensor:
        return self.output(self.key, self.value)

    def key_error(self, key: Tensor) -> float:
        """Mean squared error of the output with other keys (after RoPE) and the exact values."""
        return float((self.output(key, self.value) - self._exact).square().mean())

    def value_error(self, value: Tensor) -> float:
        """Mean squared error of the output with other values and the exact keys."""
        return float((self.output(self.key, value) - self._exact).square().mean())

    @cached_property
    def _turn(self) -> Tensor:
        """What RoPE multiplies the pair (j, j + D / 2) of a token by, complex [n, 1, D / 2], the same in all heads."""
        before, after = _pairs(self.unrotated_key), _pairs(self.key)
        size = before.abs().square().sum(1, keepdim=True)
        turn = (after * before.conj()).sum(1, keepdim=True) / size
        return torch.where(size > 0, turn, torch.ones_like(turn))

    def rotated(self, x: Tensor) -> Tensor:
        """Keys [n, H, D] before RoPE, as attention would see them, float32."""
        pairs = _pairs(x) * self._turn
        return torch.cat([pairs.real, pairs.imag], -1)


DRAWN = tuple(field.name for field in fields(DrawnAttention))
"""What is drawn of a prompt's tokens, in that order."""


def _pairs(x: Tensor) -> Tensor:
    return torch.complex(*x.float().chunk(2, -1))


def search_clips(clusters: int, error: Callable[[Tensor], float]) -> Tensor:
    """Clips [clusters], each out of `CLIPS`, of small `error`, a function of them: float32.

    Begins with the best clip that all clusters share, then gives one cluster after the other its best, twice. So no
    shared clip of `CLIPS`, and no clip at all (1.0), has a smaller error.
    """
    shared = [torch.full((clusters,), clip) for clip in CLIPS]
    least, best = min(((error(clips), clips) for clips in shared), key=lambda found: found[0])
    for cluster in [*range(clusters), *range(clusters)] if clusters > 1 else []:
        for clip in CLIPS:
            tried = best.clone()
            tried[cluster] = clip
            found = error(tried)
            if found < least:
                least, best = found, tried
    return best
