"""LLaVA-1.5 (https://arxiv.org/abs/2310.03744), `LlavaForConditionalGeneration`."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from windowquant.models.adapter import Adapter
from windowquant.models.pictures import Run


class Llava(Adapter):
    """Every image has the same number of tokens, so that images without text in between can be told apart."""

    model_type = "llava"

    def frames_in(self, model: PreTrainedModel, inputs: Mapping[str, Any], run: Run) -> list[int]:
        vision = model.config.vision_config
        per_image = (vision.image_size // vision.patch_size) ** 2
        return [per_image] * (run.length // per_image)
