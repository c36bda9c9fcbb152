"""Qwen2.5-VL (https://arxiv.org/abs/2502.13923), `Qwen2_5_VLForConditionalGeneration`."""

from windowquant.models.mrope import MRope


class Qwen25VL(MRope):
    """As Qwen2-VL; positions in time follow the video's seconds (`second_per_grid_ts`)."""

    model_type = "qwen2_5_vl"
