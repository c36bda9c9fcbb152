"""When a token turns from exact to coded, as a function of how many tokens there are."""

from dataclasses import dataclass
from typing import Protocol

from windowquant.errors import UserError


class Rule(Protocol):
    """Tokens are coded in order; the first `sinks` never are. The rest follows from the number of tokens alone, so a
    cache never depends on how its tokens were cut into updates.
    """

    @property
    def sinks(self) -> int:
        """How many of the first tokens stay exact."""

    def coded(self, tokens: int) -> int:
        """Position up to which tokens are coded (from `sinks` on) once `tokens` are held; it never falls."""

    def read_coded(self, position: int) -> int:
        """The same as the token at `position` reads it during its own step."""


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of `size` tokens are coded, after the attention of the step that fills one (KIVI's keys)."""

    size: int

    def __post_init__(self) -> None:
        _check("block", self.size, 1)

    @property
    def sinks(self) -> int:
        return 0

    def coded(self, tokens: int) -> int:
        return tokens - tokens % self.size

    def read_coded(self, position: int) -> int:
        return self.coded(position)


@dataclass(frozen=True)
class Sliding:
    """All but the newest `window` tokens and the first `sinks` are coded.

    before: the token that leaves the window in a step is coded before that step's attention (SKVQ), else after it
    (KIVI's values).
    """

    window: int
    sinks: int = 0
    before: bool = False

    def __post_init__(self) -> None:
        _check("window", self.window, 1)
        _check("sinks", self.sinks, 0)

    def coded(self, tokens: int) -> int:
        return max(min(self.sinks, tokens), tokens - self.window)

    def read_coded(self, position: int) -> int:
        return self.coded(position + 1 if self.before else position)


def _check(name: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{name} is {value}; set it to {least} or more.")
