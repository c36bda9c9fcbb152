"""What the package must know about an architecture, in one small class each."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models.pictures import Picture, Run, runs_of, split
from windowquant.models.prompt import Prompt, require_ids

_ADAPTERS: dict[str, "Adapter"] = {}


class Adapter:
    """An architecture whose prompts mark visual tokens by placeholder ids named in the model's config.

    A subclass that names its `model_type` is found by `adapter_for` wherever a module of this package defines it; where
    the defaults do not fit, it overrides single methods.
    """

    model_type: ClassVar[str]
    placeholder_keys: ClassVar[tuple[str, ...]] = ("image_token_id", "video_token_id")
    pixel_keys: ClassVar[tuple[str, ...]] = ("pixel_values", "pixel_values_videos", "mm_encoder_outputs")
    text_config_key: str = "text_config"
    exact_features: ClassVar[bool] = True
    """Whether all that the language model learns of the pixels enters it with its inputs, so that recording these once
    and giving them again (`models.features`) equals running the vision tower."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "model_type" in cls.__dict__:
            _ADAPTERS[cls.model_type] = cls()

    def text_config(self, model: PreTrainedModel) -> Any:
        """The configuration of the language model."""
        return getattr(model.config, self.text_config_key)

    def language_model(self, model: PreTrainedModel) -> Any:
        """The decoder stack: the module that receives `inputs_embeds` [B, T, C] and the cache."""
        return model.model.language_model

    def decoder_layers(self, model: PreTrainedModel) -> list[Any]:
        """Its layers, each with a `self_attn` whose output is added to the layer's input."""
        return list(self.language_model(model).layers)

    def placeholders(self, model: PreTrainedModel) -> dict[str, int]:
        """Ids that stand for vision features in a prompt, by their key in the config; UserError if there are none."""
        known = {key: getattr(model.config, key, None) for key in self.placeholder_keys}
        named = {key: token for key, token in known.items() if token is not None}
        if not named:
            raise UserError(
                f"The config of this {model.config.model_type} model names none of {', '.join(self.placeholder_keys)}, "
                "so its visual tokens cannot be located; set them in config.json."
            )
        return named

    def is_visual(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Which token ids are replaced by vision features: bool of the shape of `ids`, on its device."""
        return torch.isin(ids, torch.tensor(list(self.placeholders(model).values()), device=ids.device))

    def prompt(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Prompt:
        """Sort the tokens of processor outputs into visual, text and padding. Raises UserError without `input_ids`."""
        ids, attended = require_ids(inputs)
        positions = self.positions(model, inputs, ids, attended)
        return Prompt(ids, attended, self.is_visual(model, ids) & attended, positions)

    def positions(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], ids: Tensor, attended: Tensor
    ) -> Tensor | None:
        """Rotary positions [P, B, T] int64 of a prompt, None where the model simply counts its tokens."""
        return None

    def pictures(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[list[Picture]]:
        """The images and frames of each row of a prompt, in order, each with the columns of its visual tokens.

        A run of visual tokens without text in between is one picture, unless the architecture knows it to be several
        (`frames_in`). Raises UserError without `input_ids`.
        """
        prompt = self.prompt(model, inputs)
        videos = getattr(model.config, "video_token_id", None)
        runs = runs_of(prompt, videos)
        return [[p for run in row for p in split(run, self.frames_in(model, inputs, run))] for row in runs]

    def frames_in(self, model: PreTrainedModel, inputs: Mapping[str, Any], run: Run) -> list[int]:
        """Visual tokens of each image or frame in a run; their sum is its length."""
        return [run.length]

    def text_embeddings(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """Word embeddings [..., C] of token ids, as they enter the language model."""
        table = model.get_input_embeddings()
        return table(ids.to(table.weight.device))


def registered() -> dict[str, Adapter]:
    """Every adapter by model type, of the modules that were imported."""
    return _ADAPTERS
