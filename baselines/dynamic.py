"""Transformers' own cache on an untouched model: the oracle of the tests and the stock speed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from windowquant.method import Bound, Method
from windowquant.models import Prompt


class _StockBound(Bound):
    """Installs nothing and makes transformers' caches."""

    def _install(self, undo: object) -> None:
        pass

    def new_cache(self, inputs: Mapping[str, Any]) -> Cache:
        self._check_active()
        return DynamicCache(config=self.text_config)


@dataclass(frozen=True)
class Dynamic(Method):
    """Nothing of ours takes part: `DynamicCache`, the model's own attention and dtype."""

    name: ClassVar[str] = "dynamic"

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        return _StockBound(self, model, processor)

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        return torch.zeros(len(sensitivity), 0)
