"""Qwen2-VL (https://arxiv.org/abs/2409.12191), `Qwen2VLForConditionalGeneration`."""

from windowquant.models.mrope import MRope


class Qwen2VL(MRope):
    """Images and videos of any resolution; each two frames of a video become one grid of visual tokens.

    The vision start and end tokens around an image or video are text.
    """

    model_type = "qwen2_vl"
