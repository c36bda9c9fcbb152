"""The part of a request that is run before the cache is packed."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from windowquant.models import Adapter
from windowquant.models.features import KEYWORD, PlacedFeatures
from windowquant.models.prompt import require_ids


def first_columns(adapter: Adapter, model: PreTrainedModel, inputs: Mapping[str, Any], columns: int) -> dict[str, Any]:
    """What the model's `forward` takes to prefill the first `columns` tokens of processor outputs, pixels included.

    Whatever has one entry per token is cut to them; a mask without padding is left out. With `visual_features` in place
    of the pixels (see `Bound.visual_features`), they come with the columns they belong to; the bound model takes them.
    """
    ids, attended = require_ids(inputs)
    left_out = {"attention_mask"} if bool(attended[:, :columns].all()) else set()
    if KEYWORD in inputs:
        visual = adapter.is_visual(model, ids[:, :columns]) & attended[:, :columns]
        inputs = {**inputs, KEYWORD: PlacedFeatures(inputs[KEYWORD], visual)}
        left_out |= {*adapter.pixel_keys}
    given = {key: value for key, value in inputs.items() if key not in left_out}
    return {k: v[:, :columns] if isinstance(v, Tensor) and v.shape[:2] == ids.shape else v for k, v in given.items()}
