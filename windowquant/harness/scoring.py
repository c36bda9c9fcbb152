"""Reading answers strictly, and intervals for what was scored."""

import math
import re
from collections.abc import Sequence

import numpy as np

LETTERS = "ABCDE"
_Z95 = 1.959963984540054
_BOOTSTRAPS = 2000
_WHOLE = re.compile(r"\(?([A-Z])\)?[.:]?", re.ASCII)
_LEADING = re.compile(r"([A-Z])[.:)] +\S.*", re.ASCII | re.DOTALL)
_BRACKETED = re.compile(r"\(([A-Z])\)", re.ASCII)


def parse_letter(text: str, options: int = len(LETTERS)) -> str | None:
    """The one option letter that an answer names, or None: never a guess.

    Understood: the letter alone ("B", "B.", "(B)"), a leading letter ("B. the cat"), and a text with exactly one
    distinct bracketed letter ("the cat (B)"). Letters beyond the number of options are not letters.
    """
    text = text.strip()
    if match := _WHOLE.fullmatch(text) or _LEADING.fullmatch(text):
        return match[1] if match[1] in LETTERS[:options] else None
    found = {letter for letter in _BRACKETED.findall(text) if letter in LETTERS[:options]}
    return found.pop() if len(found) == 1 else None


def target_letter(target: object) -> str:
    """A benchmark's target (index as int or digit string, or the letter itself) as a letter."""
    text = str(target).strip()
    return LETTERS[int(text)] if text.isdigit() else text


def wilson(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion, in percent. `successes` may be fractional (a mean over runs)."""
    if n == 0:
        return 0.0, 100.0
    p = successes / n
    centre = (p + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(p * (1 - p) / n + _Z95**2 / (4 * n * n))
    return max(0.0, 100 * (centre - half)), min(100.0, 100 * (centre + half))


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the mean of shares (0 to 1), in percent; the same for the same seed."""
    if len(values) == 0:
        return 0.0, 100.0
    draws = np.random.default_rng(seed).choice(np.asarray(values, float), (_BOOTSTRAPS, len(values)))
    low, high = np.quantile(draws.mean(1), [0.025, 0.975])
    return 100 * float(low), 100 * float(high)
