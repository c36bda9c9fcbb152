"""Architectures: one adapter each, found by the config's `model_type`.

A new one is a module here with a subclass of `Adapter` that names its `model_type`; nothing else needs to know it.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from windowquant.models.adapter import Adapter, registered
from windowquant.models.compat import cache_keyword
from windowquant.models.generic import generic
from windowquant.models.pictures import Picture
from windowquant.models.prompt import Embeddings, Prompt

__all__ = [
    "Adapter",
    "Embeddings",
    "Picture",
    "Prompt",
    "adapter_for",
    "cache_keyword",
    "text_positions",
    "visual_positions",
]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")


def adapter_for(model: PreTrainedModel) -> Adapter:
    """The adapter of a loaded transformers model.

    An unknown model type gets a generic one, with a warning, if its config names the placeholder ids of visual tokens.
    UserError if its visual tokens cannot be located.
    """
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    return registered()[model_type] if model_type in registered() else generic(model)


def visual_positions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Columns of the visual tokens of processor outputs: one ascending int64 [M_b] per row."""
    return adapter_for(model).prompt(model, inputs).visual_positions


def text_positions(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Columns of the text tokens of processor outputs: one ascending int64 [N_b] per row, padding left out."""
    return adapter_for(model).prompt(model, inputs).text_positions
