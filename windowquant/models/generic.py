"""Any other architecture whose config names the placeholder ids of its visual tokens."""

import warnings
from functools import lru_cache
from typing import Any, ClassVar

from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models.adapter import Adapter, registered


class Generic(Adapter):
    """Works from the config alone, and was tested with no checkpoint: made by `generic`, which says so."""

    placeholder_keys: ClassVar[tuple[str, ...]] = (
        "image_token_id",
        "video_token_id",
        "image_token_index",
        "video_token_index",
    )
    pixel_keys: ClassVar[tuple[str, ...]] = (*Adapter.pixel_keys, "pixel_values_images")
    exact_features: ClassVar[bool] = False

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises UserError if this model is not built as the package needs it."""
        if not isinstance(model, PreTrainedModel):
            raise _refusal(model, "it is no transformers model")
        if not any(getattr(model.config, key, None) is not None for key in self.placeholder_keys):
            raise _refusal(model, f"its config names none of {', '.join(self.placeholder_keys)}")
        text = model.config.get_text_config()
        own = [key for key in model.config.sub_configs if getattr(model.config, key, None) is text]
        if not own:
            raise _refusal(model, "its config has no part of its own for the language model")
        self.text_config_key = own[0]
        decoder = self.language_model(model)
        if not all(hasattr(decoder, name) for name in ("embed_tokens", "layers")):
            raise _refusal(model, "its decoder has no embed_tokens and layers")
        if not all(hasattr(layer, "self_attn") for layer in decoder.layers):
            raise _refusal(model, "its decoder layers have no self_attn")

    def language_model(self, model: PreTrainedModel) -> Any:
        return model.get_decoder()


def _refusal(model: Any, reason: str) -> UserError:
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return UserError(
        f"The visual tokens of a {name!r} model cannot be located, for {reason}; supported model types: "
        f"{', '.join(sorted(registered()))}."
    )


@lru_cache
def _say(model_type: str) -> None:
    warnings.warn(
        f"No adapter knows the model type {model_type!r}: its visual tokens are taken to be those that its config's "
        "placeholder ids mark, and nobody tried that.",
        stacklevel=4,
    )


def generic(model: PreTrainedModel) -> Adapter:
    """The adapter of an unknown architecture, with one warning; UserError if its visual tokens cannot be located."""
    adapter = Generic(model)
    _say(model.config.model_type)
    return adapter
