"""Two score thresholds per layer from its sensitivity (paper, equations 10 and 11; Figure 14)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from windowquant.errors import UserError

# Below this alpha both thresholds equal their common limit s to double precision.
_LINEAR = 1e-16


def check_alpha(alpha: float) -> None:
    """Raise UserError unless alpha is a finite number, 0 or more."""
    if not math.isfinite(alpha):
        raise UserError(f"alpha is {alpha}, which is not a finite number; set alpha to 0 or more (the paper uses 2).")
    if alpha < 0:
        raise UserError(
            f"alpha is {alpha}, which would put T_low above T_high; set alpha to 0 or more (the paper uses 2)."
        )


def thresholds(s: Tensor | Sequence[float] | float, alpha: float) -> tuple[Tensor, Tensor]:
    """(T_low, T_high), float64 of the shape of `s`, with 0 <= T_low <= s <= T_high <= 1.

    T_low = (e^(a s) - 1) / (e^a - 1) and T_high = (e^(-a s) - 1) / (e^-a - 1), a = alpha. `s` is clamped to [0, 1].
    Both tend to s as alpha tends to 0; a larger alpha widens the INT4 band between them. Raises UserError if alpha is
    negative or not finite, or if s is NaN.
    """
    check_alpha(alpha)
    s = torch.as_tensor(s, dtype=torch.float64)
    if bool(torch.isnan(s).any()):
        raise UserError("A layer's sensitivity is NaN, so it has no thresholds; calibrate the model again.")
    s = s.clamp(0, 1)
    if alpha < _LINEAR:
        return s, s
    high = torch.expm1(-alpha * s) / math.expm1(-alpha)
    # T_low written with negative exponents only, so that a large alpha cannot overflow.
    low = torch.exp(-alpha * (1 - s)) * high
    # Rounding may put either on the wrong side of s by one unit in the last place.
    return torch.minimum(low, s), torch.maximum(high, s).clamp(max=1)
