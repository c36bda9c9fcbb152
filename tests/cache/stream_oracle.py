"""Plain oracle of the streaming cache: every token kept whole, coded by its definition each time it is read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.cache.streaming.rules import Rule


def rounded(group: Tensor, bits: int) -> Tensor:
    """A group [n] to the nearest of 2**bits values between its minimum and its maximum, in float64."""
    low, high = float(group.min()), float(group.max())
    step = (high - low) / (2**bits - 1)
    return group.double() if step == 0 else low + step * torch.round((group.double() - low) / step)


def per_channel(x: Tensor, group: int, bits: int) -> Tensor:
    """x [B, H, T, D] in groups of `group` tokens; what does not fill a group stays."""
    out = x.double().clone()
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for d in range(x.shape[3]):
                for t in range(0, x.shape[2] // group * group, group):
                    out[b, h, t : t + group, d] = rounded(x[b, h, t : t + group, d], bits)
    return out


def per_token(x: Tensor, group: int, bits: int) -> Tensor:
    """x [B, H, T, D] in groups of `group` channels."""
    return per_channel(x.transpose(2, 3), group, bits).transpose(2, 3)


@dataclass
class Exact:
    """All of K and V [B, H, T, D], K coded per channel and V per token where the rules say so."""

    k: Tensor
    v: Tensor
    k_rule: Rule
    v_rule: Rule
    group: int
    bits: int

    def __post_init__(self) -> None:
        self._k, self._v = per_channel(self.k, self.group, self.bits), per_token(self.v, self.group, self.bits)

    def read_by(self, position: int) -> tuple[Tensor, Tensor]:
        """K and V [B, H, position + 1, D] as the token at `position` reads them."""
        return (
            _mixed(self.k, self._k, self.k_rule, position),
            _mixed(self.v, self._v, self.v_rule, position),
        )


def _mixed(exact: Tensor, coded: Tensor, rule: Rule, position: int) -> Tensor:
    out = exact[:, :, : position + 1].double().clone()
    end = rule.read_coded(position)
    if end > rule.sinks:
        out[:, :, rule.sinks : end] = coded[:, :, rule.sinks : end]
    return out


def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Of one query a head, q [B, Hq, D] over k, v [B, H, T, D]: [B, Hq, D] float32."""
    out = torch.zeros(q.shape)
    share = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            weights = (scaling * (k[b, h // share] @ q[b, h].double())).softmax(0)
            out[b, h] = (weights @ v[b, h // share]).float()
    return out
