"""Transformers' own cache on an untouched model: the oracle of the tests and the stock speed."""

from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import Cache, DynamicCache

from windowquant.method import Status
from windowquant.stock_method import StockMethod


@dataclass(frozen=True)
class Dynamic(StockMethod):
    """Nothing of ours takes part: `DynamicCache`, the model's own attention and dtype."""

    name: ClassVar[str] = "dynamic"
    declared: ClassVar[Status] = "control"

    def make_cache(self, text_config: Any) -> Cache:
        return DynamicCache(config=text_config)
