"""LLaVA-OneVision (https://arxiv.org/abs/2408.03326), `LlavaOnevisionForConditionalGeneration`."""

from typing import Any

from transformers import PreTrainedModel

from windowquant.models.adapter import Adapter


class LlavaOnevision(Adapter):
    """Image and video features replace placeholder ids one for one.

    The newline embeddings (one after a video, one per row of an image) are emitted by the projector inside the visual
    span, so they count as visual tokens; after a video the newline is the last one and, unless it happens to complete a
    window, stays in 16 bit.
    """

    model_type = "llava_onevision"

    def language_model(self, model: PreTrainedModel) -> Any:
        return model.model.language_model
