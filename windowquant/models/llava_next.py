"""LLaVA-NeXT, also called LLaVA-v1.6 (https://arxiv.org/abs/2310.03744), `LlavaNextForConditionalGeneration`."""

from windowquant.models.adapter import Adapter


class LlavaNext(Adapter):
    """An image is the whole picture, then its tiles row by row, each row closed by a newline embedding.

    The projector emits the newlines, so they count as visual tokens. An image's number of tokens depends on its shape:
    images without text in between count as one picture.
    """

    model_type = "llava_next"
