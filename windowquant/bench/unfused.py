"""Attention over packed blocks without fusing: everything is dequantized first, then multiplied (paper, Table 9)."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from windowquant.core.packed import PackedLayer, WindowBlock
from windowquant.core.quantizer import dequantize
from windowquant.errors import UserError


@torch.no_grad()
def attend(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor:
    """As `kernels.reference.attend`, for one query token without a mask (UserError for anything else).

    K and V are written out in the dtype of `q`, and the query heads that share a KV head are the rows of its SDPA.
    """
    if q.shape[2] != 1 or mask is not None:
        raise UserError("The unfused path is measured in decode only: give one query token a request, and no mask.")
    k = _whole([segment.k for segment in layer.segments], layer.fp_k, q.dtype)
    v = _whole([segment.v for segment in layer.segments], layer.fp_v, q.dtype)
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    return scaled_dot_product_attention(rows, k, v, scale=scaling).reshape(q.shape)


def _whole(blocks: list[WindowBlock], rest: Tensor, dtype: torch.dtype) -> Tensor:
    """All tokens in stored order, [B, H, T, D]."""
    return torch.cat([*(dequantize(block).flatten(2, 3).to(dtype) for block in blocks), rest.to(dtype)], dim=2)
