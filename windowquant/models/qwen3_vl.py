"""Qwen3-VL (https://arxiv.org/abs/2511.21631), `Qwen3VLForConditionalGeneration`."""

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from windowquant.models.mrope import MRope
from windowquant.models.pictures import Run


class Qwen3VL(MRope):
    """Every two frames of a video are a run of their own, after a timestamp and between vision start and end tokens,
    all of which are text. Features of deeper vision layers are added to the first decoder layers at the visual columns
    (DeepStack): what the search sees is the first of them, the embeddings."""

    model_type = "qwen3_vl"

    def frames_in(self, model: PreTrainedModel, inputs: Mapping[str, Any], run: Run) -> list[int]:
        return [run.length]
