"""What the package must know about an architecture, in one small class each."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models.prompt import Prompt, require_ids


class Adapter:
    """An architecture whose prompts mark visual tokens by placeholder ids named in the model's config.

    Subclasses name their `model_type` and, where the defaults do not fit, override single methods.
    """

    model_type: ClassVar[str]
    placeholder_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")
    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
    pixel_size_keys: ClassVar[tuple[str, ...]] = ("image_sizes", "image_sizes_videos", "batch_num_images")
    text_config_key: ClassVar[str] = "text_config"

    def text_config(self, model: PreTrainedModel) -> Any:
        """The configuration of the language model."""
        return getattr(model.config, self.text_config_key)

    def language_model(self, model: PreTrainedModel) -> Any:
        """The decoder stack: the module that receives `inputs_embeds` [B, T, C] and the cache."""
        raise NotImplementedError

    def decoder_layers(self, model: PreTrainedModel) -> list[Any]:
        """Its layers, each with a `self_attn` whose output is added to the layer's input."""
        return list(self.language_model(model).layers)

    def is_visual(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Which token ids are replaced by vision features: bool of the shape of `ids`, on its device."""
        known = [getattr(model.config, key, None) for key in self.placeholder_keys]
        placeholders = [token for token in known if token is not None]
        if not placeholders:
            raise UserError(
                f"The config of this {self.model_type} model names none of {', '.join(self.placeholder_keys)}, so its "
                "visual tokens cannot be located; set them in config.json."
            )
        return torch.isin(ids, torch.tensor(placeholders, device=ids.device))

    def prompt(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Prompt:
        """Sort the tokens of processor outputs into visual, text and padding. Raises UserError without `input_ids`."""
        ids, attended = require_ids(inputs)
        return Prompt(ids, attended, self.is_visual(model, ids) & attended)

    def text_embeddings(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Word embeddings [..., C] of token ids, as they enter the language model."""
        table = model.get_input_embeddings()
        return table(ids.to(table.weight.device))
