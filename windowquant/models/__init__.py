"""Architectures: one adapter each, found by the config's `model_type`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models.adapter import Adapter
from windowquant.models.compat import cache_keyword
from windowquant.models.llava_onevision import LlavaOnevision
from windowquant.models.prompt import Embeddings, Prompt

__all__ = ["Adapter", "Embeddings", "Prompt", "adapter_for", "cache_keyword", "text_positions", "visual_positions"]

_ADAPTERS: dict[str, Adapter] = {adapter.model_type: adapter for adapter in (LlavaOnevision(),)}


def adapter_for(model: PreTrainedModel) -> Adapter:
    """The adapter of a loaded transformers model; UserError if its visual tokens cannot be located."""
    model_type = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if model_type not in _ADAPTERS:
        raise UserError(
            f"The visual tokens of a {model_type!r} model cannot be located; supported model types: "
            f"{', '.join(sorted(_ADAPTERS))}."
        )
    return _ADAPTERS[model_type]


def visual_positions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Columns of the visual tokens of processor outputs: one ascending int64 [M_b] per row."""
    return adapter_for(model).prompt(model, inputs).visual_positions


def text_positions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Columns of the text tokens of processor outputs: one ascending int64 [N_b] per row, padding left out."""
    return adapter_for(model).prompt(model, inputs).text_positions
