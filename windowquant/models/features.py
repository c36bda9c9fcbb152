"""The vision side of a request on its own, so that many questions about one video need it once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.models.adapter import Adapter


class _Reached(Exception):
    """Carries the embeddings out of a forward pass that need not go on."""

    def __init__(self, embeds: Tensor) -> None:
        self.embeds = embeds


def _stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(kwargs["inputs_embeds"])


@torch.no_grad()
def visual_features(adapter: Adapter, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """Visual tokens [M, C] of one request (batch 1) as they enter the language model, which does not run.

    Given back as `inputs["visual_features"]` in place of the pixels, they spare a later request the vision tower.
    """
    hook = adapter.language_model(model).register_forward_pre_hook(_stop, with_kwargs=True)
    try:
        model(**inputs, use_cache=False)
    except _Reached as reached:
        visual = adapter.prompt(model, inputs).visual[0]
        return reached.embeds[0, visual.to(reached.embeds.device)]
    finally:
        hook.remove()
    raise AssertionError("the language model was not called")


@torch.no_grad()
def embed_prompt(adapter: Adapter, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Tensor:
    """Embeddings [1, T, C] of a request whose `visual_features` are known, as they enter the language model."""
    embeds = adapter.text_embeddings(model, inputs["input_ids"]).clone()
    visual = adapter.prompt(model, inputs).visual[0]
    embeds[0, visual.to(embeds.device)] = inputs["visual_features"].to(embeds)
    return embeds
