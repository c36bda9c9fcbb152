"""InternVL (https://arxiv.org/abs/2504.10479) in its transformers form, `InternVLForConditionalGeneration`."""

from windowquant.models.adapter import Adapter


class InternVL(Adapter):
    """Each frame of a video is a run of image tokens after the text "Frame1:"; an image is one run, however many tiles
    it was cut into. `<img>` and `</img>` around them are text."""

    model_type = "internvl"
