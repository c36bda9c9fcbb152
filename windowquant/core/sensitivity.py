"""How much a layer changes its input (paper, equation 9)."""

import torch
from torch import Tensor

from windowquant.errors import UserError


def hidden_similarity(h_in: Tensor, h_out: Tensor, mask: Tensor | None = None) -> float:
    """Mean over tokens of the cosine between a layer's hidden states before and after its attention block.

    h_in, h_out: [T, C], before the block and after its residual addition, any float dtype (computed in float32).
    mask: bool [T], true for the tokens that count (not padding). A value near 1 means that the layer changes little and
    bears hard quantization. Raises UserError if no token counts or a value is not finite.
    """
    cosines = torch.nn.functional.cosine_similarity(h_in.float(), h_out.float(), dim=-1)
    if mask is not None:
        cosines = cosines[mask]
    if cosines.numel() == 0:
        raise UserError(
            "No token counts for a layer's sensitivity; calibrate on at least one prompt that is not padding."
        )
    value = float(cosines.mean())
    if value != value:
        raise UserError("Hidden states hold NaN or infinity, so a layer's sensitivity is undefined; check the prefill.")
    return value
