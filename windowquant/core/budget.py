"""Choosing alpha so that a plan meets a budget of bits; the paper fixes alpha instead."""

from collections.abc import Callable
from itertools import pairwise

from windowquant.errors import UserError

_SCANNED = (0.0, *(10 ** (step / 10) for step in range(-10, 31)))  # 0, then ten a decade from 0.1 to 1000
_HALVINGS = 14


def check_target(target: object) -> None:
    """Raise UserError unless `target` is None or a number above 0 and up to 16."""
    if target is None:
        return
    number = isinstance(target, int | float) and not isinstance(target, bool)
    if not number or not 0 < float(target) <= 16:  # type: ignore[arg-type]
        raise UserError(
            f"target_bits is {target!r}; give a number of bits above 0 and up to 16, or null for a fixed alpha."
        )


def alpha_for(average: Callable[[float], float], target: float, preferred: float) -> float:
    """The alpha whose plan has the most bits at or below `target`; of equally good ones that nearest to `preferred`.

    average: bits of the plan that an alpha gives, see `plan.average_bits`. It is piecewise constant and not monotonic:
    a wider INT4 band takes windows from 16 bit as well as from INT2. So alphas from 0 to 1000 are scanned, and wherever
    two neighbours lie on either side of the target, bisection finds the step between them. Raises UserError, naming
    the range that was reached, if every plan has more bits than the target.
    """
    seen = {alpha: average(alpha) for alpha in sorted({*_SCANNED, preferred})}
    for low, high in pairwise(list(seen)):
        if (seen[low] <= target) != (seen[high] <= target):
            seen.update(_bisected(average, target, low, high))
    fitting = {alpha: bits for alpha, bits in seen.items() if bits <= target}
    if not fitting:
        raise UserError(
            f"target_bits is {target:g}, but alpha reaches {min(seen.values()):.3g} to {max(seen.values()):.3g} bits "
            "for this request, scales and offsets included; raise it, or choose smaller widths or larger windows."
        )
    return min(fitting, key=lambda alpha: (-fitting[alpha], abs(alpha - preferred)))


def _bisected(average: Callable[[float], float], target: float, low: float, high: float) -> dict[float, float]:
    """Averages at the alphas that bisection looks at between two of which one meets the target."""
    seen: dict[float, float] = {}
    low_meets = average(low) <= target
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        seen[middle] = average(middle)
        if (seen[middle] <= target) == low_meets:
            low = middle
        else:
            high = middle
    return seen
