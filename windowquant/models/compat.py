"""The few places where supported versions of transformers spell things differently."""

import inspect

from transformers import PreTrainedModel


def cache_keyword(model: PreTrainedModel) -> str:
    """How `forward` and `generate` of this model call the cache: "cache", in older versions "past_key_values"."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
