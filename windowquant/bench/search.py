"""What the search for bit-widths takes, by windows and by single tokens: windows are far cheaper, says the paper."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from windowquant.bench.shapes import WINDOW, TextShape
from windowquant.bench.synthetic import AFTER, stand_in_sensitivity
from windowquant.bench.timing import clock_for, interleaved, summary
from windowquant.core.search import search_plan
from windowquant.core.similarity import window_scores


def measure_search(
    shape: TextShape, visual: int, dtype: torch.dtype, device: torch.device, rounds: int
) -> list[dict[str, Any]]:
    """Rows `search`, `seconds`: scores of random embeddings and the plan of every layer.

    "window" and "token" use the mean of normalised vectors, which needs no product of every visual with every text
    token; "window, every pair" and "token, every pair" form all of those products, as equation 8 is written.
    """
    video = torch.randn(visual, shape.hidden, dtype=dtype, device=device)
    text = torch.randn(AFTER, shape.hidden, dtype=dtype, device=device)
    sensitivity = torch.tensor(stand_in_sensitivity(shape.layers))

    def plan(scores: Tensor) -> Tensor:
        return search_plan(scores.cpu(), sensitivity)

    def pairs(size: int) -> Tensor:
        cosines = normalize(video.float(), dim=-1) @ normalize(text.float(), dim=-1).T
        means = cosines[: visual // size * size].view(-1, size * AFTER).mean(1)
        return (means - means.min()) / (means.max() - means.min())

    steps = {
        "window": lambda: plan(window_scores(video, text, WINDOW)),
        "token": lambda: plan(window_scores(video, text, 1)),
        "window, every pair": lambda: plan(pairs(WINDOW)),
        "token, every pair": lambda: plan(pairs(1)),
    }
    times = interleaved(steps, rounds, clock_for(device))
    return [{"search": name, "visual_tokens": visual, "seconds": summary(values)} for name, values in times.items()]
