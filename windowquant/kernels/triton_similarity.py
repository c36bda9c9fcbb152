"""Window scores for long videos in one launch over the embeddings, which are read once (paper, equation 8)."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from windowquant.core import similarity
from windowquant.kernels.triton_common import check_device, configs, padded

_TINY = tl.constexpr(1e-12)


@triton.autotune(configs((4, 2), (8, 2), (4, 3)), key=["C", "TILE", "METRIC"])
@triton.jit
def means_kernel(
    visual,
    centroid,
    out,
    over_tokens,
    size,
    C: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    METRIC: tl.constexpr,
):
    """Program w: the mean over window w of what its tokens add; see `core.similarity.window_means`."""
    window = tl.program_id(0).to(tl.int64)
    total = tl.zeros([TILE], tl.float32)
    for begin in range(0, size, TILE):
        token = begin + tl.arange(0, TILE)
        valid = token < size
        rows = visual + (window * size + token)[:, None] * over_tokens
        mean = tl.zeros([TILE], tl.float32)
        if METRIC == "pearson":
            for start in range(0, C, CHUNK):
                channel = start + tl.arange(0, CHUNK)
                mask = valid[:, None] & (channel < C)[None, :]
                mean += tl.sum(tl.load(rows + channel[None, :], mask=mask, other=0).to(tl.float32), 1)
            mean = mean / C
        products = tl.zeros([TILE], tl.float32)
        squares = tl.zeros([TILE], tl.float32)
        for start in range(0, C, CHUNK):
            channel = start + tl.arange(0, CHUNK)
            mask = valid[:, None] & (channel < C)[None, :]
            x = tl.load(rows + channel[None, :], mask=mask, other=0).to(tl.float32)
            c = tl.load(centroid + channel, mask=channel < C, other=0)[None, :]
            if METRIC == "euclidean":
                x = tl.where(mask, x - c, 0.0)
            else:
                x = tl.where(mask, x - mean[:, None], 0.0)
                products += tl.sum(x * c, 1)
            squares += tl.sum(x * x, 1)
        if METRIC == "euclidean":
            total += tl.where(valid, squares, 0.0)
        else:
            total += tl.where(valid, products / tl.maximum(tl.sqrt(squares), _TINY), 0.0)
    tl.store(out + window, tl.sum(total, 0) / size)


@torch.no_grad()
def window_means(visual: Tensor, centroid: Tensor, window_size: int, metric: str) -> Tensor:
    """`core.similarity.window_means` in one launch. Raises UserError off a CUDA device."""
    check_device(visual)
    visual = visual if visual.stride(-1) == 1 else visual.contiguous()
    count, channels = visual.shape[0] // window_size, visual.shape[1]
    out = torch.empty(count, dtype=torch.float32, device=visual.device)
    means_kernel[(count,)](
        visual,
        centroid.contiguous(),
        out,
        visual.stride(0),
        window_size,
        C=channels,
        TILE=min(padded(window_size), 16),
        CHUNK=min(padded(channels), 256),
        METRIC=metric,
    )
    return out


window_scores = partial(similarity.window_scores, means=window_means)
"""`core.similarity.window_scores`, with the embeddings gone through in one launch."""
