"""The vision side of a request on its own, so that many questions about one video need it once.

What the pixels decide enters the language model at the visual columns: it is recorded there, and put back there in
later requests, whose forward pass is given no pixels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models.adapter import Adapter

KEYWORD = "visual_features"


@dataclass(frozen=True, eq=False)
class VisualFeatures:
    """What the language model gets of one request's images and videos.

    tokens: [M, C], in place of the placeholders' word embeddings. deeper: [M, C] each, added to the output of the first
    decoder layers (DeepStack); empty for most architectures.
    """

    tokens: Tensor
    deeper: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.tokens, *self.deeper))


@dataclass(frozen=True, eq=False)
class PlacedFeatures:
    """Features and the columns they belong to in the pass they are given to: `visual` is bool [1, t]."""

    features: VisualFeatures
    visual: Tensor


class _Reached(Exception):
    """Carries the language model's inputs out of a forward pass that need not go on."""

    def __init__(self, kwargs: dict[str, Any]) -> None:
        self.kwargs = kwargs


def _stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(kwargs)


@torch.no_grad()
def visual_features(adapter: Adapter, model: PreTrainedModel, inputs: Mapping[str, Any]) -> VisualFeatures:
    """What the vision side makes of one request (batch 1); the language model does not run.

    Given back as `inputs["visual_features"]` in place of the pixels, it spares a later request the vision tower. Raises
    UserError for an architecture whose adapter cannot promise that this is all the pixels decide.
    """
    if not adapter.exact_features:
        raise UserError(
            f"The features of a {model.config.model_type!r} model cannot be given on their own; keep the pixels."
        )
    hook = adapter.language_model(model).register_forward_pre_hook(_stop, with_kwargs=True)
    try:
        model(**inputs, use_cache=False)
    except _Reached as reached:
        embeds, deeper = reached.kwargs["inputs_embeds"], reached.kwargs.get("deepstack_visual_embeds")
        visual = adapter.prompt(model, inputs).visual[0].to(embeds.device)
        return VisualFeatures(embeds[0, visual], tuple(deeper or ()))
    finally:
        hook.remove()
    raise AssertionError("the language model was not called")


def take_features(language_model: nn.Module) -> Any:
    """Let the language model take `PlacedFeatures` as its keyword argument `visual_features`; returns the hook."""
    return language_model.register_forward_pre_hook(_put_back, with_kwargs=True)


def _put_back(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    if KEYWORD not in kwargs:
        return None
    placed: PlacedFeatures = kwargs[KEYWORD]
    rest = {key: value for key, value in kwargs.items() if key != KEYWORD}
    rest["inputs_embeds"] = embeds = kwargs["inputs_embeds"].clone()
    visual, features = placed.visual.to(embeds.device), placed.features
    embeds[visual] = features.tokens.to(embeds)
    if features.deeper:
        rest["visual_pos_masks"], rest["deepstack_visual_embeds"] = visual, list(features.deeper)
    return args, rest
