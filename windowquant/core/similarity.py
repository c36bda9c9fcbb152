"""Similarity between the prompt and each window of visual tokens (paper, equation 8; the metrics of Table 11).

The paper averages a pairwise measure over all text tokens j and window tokens k. Every metric here is written so that
the double mean factorises through one centroid of the text, which costs O((M + N) * C) instead of O(M * N * C):

cosine     mean_jk cos(t_j, w_k) = mean_k <c, w_k> / |w_k|, with c = mean_j t_j / |t_j|.
pearson    the same for vectors whose mean over channels has been taken off.
euclidean  1 / (1 + r), r the root mean square distance: r**2 = mean_k |w_k - c|**2 + mean_j |t_j - c|**2, with
           c = mean_j t_j. The paper does not say how it turns a distance into a similarity; this maps to (0, 1] and
           keeps the order. The mean square, unlike the mean, distance factorises.
"""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from windowquant.core.windows import split_windows
from windowquant.errors import UserError

Metric = Literal["cosine", "pearson", "euclidean"]
Scaling = Literal["minmax", "none", "rank"]

Means = Callable[[Tensor, Tensor, int, str], Tensor]
"""How the embeddings are gone through: see `window_means`."""

_TINY = 1e-12
# Elements in the float32 buffer: 1 MiB stays in a CPU core's cache, so that the embeddings are read once and never
# copied whole; a GPU wants large pieces.
_CHUNK = {"cpu": 2**18, "cuda": 2**26}


def _text_centroid(text: Tensor, metric: str) -> tuple[Tensor, float]:
    """The centroid [C] of the text tokens [N, C], and the mean square distance from it (euclidean only)."""
    text = text.float()
    if metric == "euclidean":
        centroid = text.mean(0)
        return centroid, float((text - centroid).square().sum(-1).mean())
    if metric == "pearson":
        text = text - text.mean(-1, keepdim=True)
    return torch.nn.functional.normalize(text, dim=-1, eps=_TINY).mean(0), 0.0


def _token_values(tokens: Tensor, centroid: Tensor, metric: str, buffer: Tensor) -> Tensor:
    """What each of the `tokens` [n, C] adds to its window's mean: float32 [n]. Overwrites `buffer` [n, C], float32."""
    if metric == "euclidean":
        return torch.linalg.vector_norm(torch.sub(tokens, centroid, out=buffer), dim=-1).square_()
    if metric == "pearson":
        torch.sub(tokens, tokens.mean(-1, keepdim=True, dtype=torch.float32), out=buffer)
    else:
        buffer.copy_(tokens)
    return (buffer @ centroid) / torch.linalg.vector_norm(buffer, dim=-1).clamp_min_(_TINY)


def _scale(scores: Tensor, scaling: str) -> Tensor:
    """Map scores [W] to [0, 1] within the request; a request whose windows do not differ gets 0.5 throughout."""
    if scaling == "none":
        return scores
    if scaling == "rank":
        below = (scores[:, None] > scores).sum(1)
        ties = (scores[:, None] == scores).sum(1) - 1
        return (below + 0.5 * ties) / (len(scores) - 1) if len(scores) > 1 else torch.full_like(scores, 0.5)
    low, high = scores.min(), scores.max()
    return torch.where(high > low, (scores - low) / (high - low).clamp_min(_TINY), 0.5)


def _check(visual: Tensor, text: Tensor, metric: str, scaling: str) -> None:
    if metric not in get_args(Metric):
        raise UserError(f"metric is {metric!r}; use one of {', '.join(get_args(Metric))}.")
    if scaling not in get_args(Scaling):
        raise UserError(f"scaling is {scaling!r}; use one of {', '.join(get_args(Scaling))}.")
    if text.shape[0] == 0:
        raise UserError("The prompt has no text token to compare the video with; add a question to the prompt.")
    if visual.shape[-1] != text.shape[-1]:
        raise UserError(
            f"Visual embeddings have {visual.shape[-1]} channels and text embeddings {text.shape[-1]}; "
            "take both in the language model's embedding space."
        )


def window_means(visual: Tensor, centroid: Tensor, window_size: int, metric: str) -> Tensor:
    """Mean over each whole window of what its tokens `visual` [M, C] add by the metric: float32 [W], W > 0.

    centroid: float32 [C], of the text. Cosine and pearson: <centroid, w> / |w| (w with its mean taken off); euclidean:
    |w - centroid|**2.
    """
    tokens = visual[: visual.shape[0] // window_size * window_size]
    step = max(1, min(len(tokens), _CHUNK.get(visual.device.type, _CHUNK["cuda"]) // visual.shape[-1]))
    buffer = centroid.new_empty(step, visual.shape[-1])
    values = [_token_values(chunk, centroid, metric, buffer[: len(chunk)]) for chunk in tokens.split(step)]
    return torch.cat(values).view(-1, window_size).mean(1)


@torch.no_grad()
def window_scores(
    visual: Tensor,
    text: Tensor,
    window_size: int,
    metric: Metric = "cosine",
    scaling: Scaling = "minmax",
    means: Means = window_means,
) -> Tensor:
    """Score each whole window of the request against its text: float32 [W].

    visual [M, C], text [N, C]: embeddings as they enter the language model, any float dtype. `scaling`: "none" leaves
    the metric as it is, "minmax" stretches the request's scores to [0, 1], "rank" replaces each by its rank / (W - 1),
    ties averaged. `means`: what goes through the embeddings (a fused kernel, say). Raises UserError if there is no
    text, an option is unknown, or an embedding is NaN or infinite.
    """
    _check(visual, text, metric, scaling)
    windows = split_windows(visual, window_size)
    if windows.shape[0] == 0:
        return torch.empty(0, device=visual.device)
    centroid, spread = _text_centroid(text, metric)
    scores = means(visual, centroid, window_size, metric)
    if not bool(torch.isfinite(scores).all()):
        raise UserError(
            "Embeddings hold NaN or infinity, so windows cannot be scored; look at the vision tower's output."
        )
    if metric == "euclidean":
        scores = 1 / (1 + (scores + spread).sqrt())
    return _scale(scores, scaling)
