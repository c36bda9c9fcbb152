"""Packed layers and answers, on a device and back."""

import torch
from torch import Tensor

from tests.kernels.build import Case, Shape, causal, plain_attention, queries, relative_error
from windowquant.core.packed import PackedLayer, Segment, WindowBlock
from windowquant.kernels.triton_attention import attend

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-3 + torch.finfo(torch.bfloat16).eps, torch.float32: 1e-5}
"""Relative error of an answer; a bfloat16 answer is itself rounded by half its eps."""


def _block(block: WindowBlock, device: torch.device) -> WindowBlock:
    codes, scale, offset = (x.to(device) for x in (block.codes, block.scale, block.offset))
    return WindowBlock(codes, scale, offset, block.bits, block.shape, block.granularity)


def moved(layer: PackedLayer, device: torch.device) -> PackedLayer:
    """The layer on `device`."""
    segments = tuple(Segment(_block(s.k, device), _block(s.v, device), s.windows) for s in layer.segments)
    return PackedLayer(layer.fp_k.to(device), layer.fp_v.to(device), segments, layer.order.to(device))


def answer(q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float, device: torch.device) -> Tensor:
    """What the kernel answers, on the CPU."""
    return attend(q.to(device), moved(layer, device), None if mask is None else mask.to(device), scaling).cpu()


def error(case: Case, shape: Shape, count: int, device: torch.device, mask: Tensor | None = None) -> float:
    """Relative error of the answer to `count` queries in the dtype of the layer, over its tolerance."""
    dtype, scaling = case.layer.fp_k.dtype, shape.channels**-0.5
    q = queries(shape, count).to(dtype)
    seen = causal(count, case.k.shape[2]) if mask is None else mask
    expected = plain_attention(q, case, seen, scaling)
    got = answer(q, case.layer, mask, scaling, device)
    assert got.dtype == dtype and got.shape == q.shape
    return relative_error(got, expected) / TOLERANCE[dtype]
