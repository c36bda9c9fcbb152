"""The part of a request that is run before the cache is packed."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from windowquant.models import Adapter
from windowquant.models.features import embed_prompt
from windowquant.models.prompt import require_ids


def first_columns(adapter: Adapter, model: PreTrainedModel, inputs: Mapping[str, Any], columns: int) -> dict[str, Any]:
    """What the model's `forward` takes to prefill the first `columns` tokens of processor outputs, pixels included.

    Whatever has one entry per token is cut to them; a mask without padding is left out. With `visual_features` in place
    of the pixels (see `Bound.visual_features`), the embeddings are put together here.
    """
    ids, attended = require_ids(inputs)
    left_out = {"attention_mask"} if bool(attended[:, :columns].all()) else set()
    if "visual_features" in inputs:
        inputs = {**inputs, "inputs_embeds": embed_prompt(adapter, model, inputs)}
        left_out |= {"input_ids", "visual_features", *adapter.pixel_keys, *adapter.pixel_size_keys}
    given = {key: value for key, value in inputs.items() if key not in left_out}
    return {k: v[:, :columns] if isinstance(v, Tensor) and v.shape[:2] == ids.shape else v for k, v in given.items()}
