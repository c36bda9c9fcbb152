"""LLaVA-OneVision (https://arxiv.org/abs/2408.03326), `LlavaOnevisionForConditionalGeneration`."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from windowquant.models.adapter import Adapter
from windowquant.models.pictures import Run


class LlavaOnevision(Adapter):
    """Image and video features replace placeholder ids one for one.

    The newline embeddings (one after a video, one per row of an image) are emitted by the projector inside the visual
    span, so they count as visual tokens; after a video the newline is the last one and, unless it happens to complete a
    window, stays in 16 bit.
    """

    model_type = "llava_onevision"

    def frames_in(self, model: PreTrainedModel, inputs: Mapping[str, Any], run: Run) -> list[int]:
        if run.kind == "image":
            return [run.length]
        vision = model.config.vision_config
        pooled = -(-(vision.image_size // vision.patch_size) // 2)  # 2x2 to one, rounded up
        frames = (run.length - 1) // pooled**2
        return [pooled**2] * (frames - 1) + [pooled**2 + 1]
