"""From the embeddings of one request to its plan, at the moment they enter the language model."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windowquant.core.plan import BitPlan, KVShape
from windowquant.core.sensitivity import hidden_similarity
from windowquant.models import Embeddings, Prompt
from windowquant.timing import synchronize

if TYPE_CHECKING:
    from windowquant.window_method import WindowMethod


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of `x` [t, C] at ascending indices; a view where they are consecutive, which spares a copy of the video."""
    if len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1:
        return x[int(rows[0]) : int(rows[-1]) + 1]
    return x[rows.to(x.device)]


def kv_shape(text_config: Any) -> KVShape:
    """KV heads and their channels, from the configuration of a language model."""
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    return KVShape(kv_heads, getattr(text_config, "head_dim", None) or text_config.hidden_size // heads)


class RequestPlanner:
    """Plans one request: collects what enters the language model, then answers for the bits of each layer.

    `sensitivity` None means "online": layer l is planned only once its own hidden states were seen (`learn`).
    `row` is None until then. `kv`: sizes of the model's K and V. `search_s`: seconds spent on text embeddings, scores
    and the search.
    """

    def __init__(
        self,
        method: "WindowMethod",
        prompt: Prompt,
        layers: int,
        sensitivity: tuple[float, ...] | None,
        embed_text: Callable[[Tensor], Tensor],
        kv: KVShape,
    ) -> None:
        self.prompt, self.scores, self.search_s = prompt, None, 0.0
        self._method, self._embed_text, self._kv = method, embed_text, kv
        self._online = sensitivity is None
        self._sensitivity = torch.tensor(sensitivity if sensitivity is not None else [0.0] * layers)
        self._cosines = [(0.0, 0)] * layers  # sum and number of token cosines seen so far, a layer
        self._visual: list[list[Tensor]] = [[] for _ in range(prompt.batch)]
        self._seen = 0
        self._plan: BitPlan | None = None

    scores: list[Tensor] | None

    @torch.compiler.disable
    def observe(self, embeds: Tensor) -> None:
        """Take in the embeddings [B or k * B, t, C] of the next t columns; searches once the last visual one is in.

        With k copies of every row (beams), the first copy is looked at.
        """
        if self._plan is not None:
            return
        rows, start = embeds[:: embeds.shape[0] // self.prompt.batch], self._seen
        self._seen += embeds.shape[1]
        for row, kept in enumerate(self._visual):
            here = self.prompt.visual_positions[row]
            here = here[(here >= start) & (here < self._seen)] - start
            kept.append(_take(rows[row].detach(), here))
        if self._seen >= self.prompt.visual_end:
            self._search()

    @torch.no_grad()
    def _search(self) -> None:
        device = self._visual[0][0].device
        synchronize(device)
        start = time.perf_counter()
        text = [
            self._embed_text(ids[at]) for ids, at in zip(self.prompt.input_ids, self.prompt.text_positions, strict=True)
        ]
        visual = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in self._visual]
        self.scores = self._method.scores(Embeddings(visual, text))
        self._plan = self._planned()
        self._visual = []
        synchronize(device)
        self.search_s += time.perf_counter() - start

    def _planned(self) -> BitPlan:
        return self._method.plan(self.prompt, self.scores, self._sensitivity, self._kv)

    def row(self, layer: int) -> tuple[int, ...] | None:
        """Bits of each window (of its K) in `layer`, or None while they are not known."""
        if self._plan is None or (self._online and self._cosines[layer][1] == 0):
            return None
        return self._plan.bits[layer]

    @torch.compiler.disable
    def learn(self, layer: int, h_in: Tensor, h_out: Tensor, start: int) -> None:
        """Online: take in a layer's hidden states [B, t, C] around its attention, columns `start` to `start + t`."""
        attended = self.prompt.attended[:, start : start + h_in.shape[1]]
        times = h_in.shape[0] // self.prompt.batch
        mask = attended.repeat_interleave(times, 0).to(h_in.device).flatten()
        count = int(mask.sum())
        if count == 0:
            return
        similarity = hidden_similarity(h_in.flatten(0, 1), h_out.flatten(0, 1), mask)
        total, seen = self._cosines[layer]
        self._cosines[layer] = total + similarity * count, seen + count
        self._sensitivity[layer] = self._cosines[layer][0] / self._cosines[layer][1]
        if self._plan is not None:
            start_s = time.perf_counter()
            self._plan = self._planned()
            self.search_s += time.perf_counter() - start_s

    @property
    def sensitivity(self) -> tuple[float, ...]:
        """s_l as used for the plan, [L]."""
        return tuple(self._sensitivity.tolist())

    def plan(self) -> BitPlan | None:
        """The finished plan, or None before the search."""
        return self._plan
