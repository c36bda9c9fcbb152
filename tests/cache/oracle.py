"""What a packed layer stands for: its K and V put back, by plain loops, into the prompt's columns."""

import torch
from torch import Tensor

from windowquant.cache.layer import PackedCacheLayer
from windowquant.core.quantizer import dequantize


def restored(layer: PackedCacheLayer, order: Tensor) -> tuple[Tensor, Tensor]:
    """K and V float32 [B, H, columns, D] by column; NaN where a column is not stored. order: [B, T] as stored."""
    stored = layer.stored
    assert stored is not None
    out = []
    for kept, blocks in (
        (stored.kept.k, [s.k for s in stored.segments]),
        (stored.kept.v, [s.v for s in stored.segments]),
    ):
        tokens = torch.cat([*(dequantize(block).flatten(2, 3) for block in blocks), kept.float()], dim=2)
        by_column = torch.full((*tokens.shape[:2], layer.get_seq_length(), tokens.shape[3]), float("nan"))
        for row in range(tokens.shape[0]):
            for slot, column in enumerate(order[row].tolist()):
                if column >= 0:
                    by_column[row, :, column] = tokens[row, :, slot]
        out.append(by_column)
    return out[0], out[1]
