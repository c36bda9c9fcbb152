"""WindowQuant's bit counts on windows chosen at random: what the search is worth (paper, Table 8, row B)."""

from dataclasses import dataclass
from typing import ClassVar

from windowquant.errors import UserError
from windowquant.method import Status
from windowquant.windowquant_method import Search, WindowQuant


@dataclass(frozen=True)
class RandomPlan(WindowQuant):
    """`WindowQuant(search="random")` under a name of its own, for tables."""

    search: Search = "random"

    name: ClassVar[str] = "random_plan"
    declared: ClassVar[Status] = "control"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.search != "random":
            raise UserError(f"search of random_plan is {self.search!r}; leave it random, or take method windowquant.")
