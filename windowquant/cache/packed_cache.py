"""The cache of one request, behind transformers' `Cache` interface."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from windowquant.cache.kv_bytes import KVBytes
from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.origin import CacheOrigin
from windowquant.cache.request import CacheRequest
from windowquant.cache.request_cache import RequestCache
from windowquant.core.plan import BitPlan
from windowquant.models import Prompt


class Planner(Protocol):
    """Where a cache's plan comes from; `RequestPlanner` is the one that searches for it."""

    @property
    def search_s(self) -> float:
        """Seconds that the search took."""

    @property
    def scores(self) -> list[Tensor] | None:
        """Score of each window of each row, if the method looks at any."""

    @property
    def sensitivity(self) -> tuple[float, ...]:
        """s_l as used for the plan, [L]."""

    def row(self, layer: int) -> tuple[int, ...] | None:
        """Bits of each window in `layer`, or None while they are not known."""

    def observe(self, embeds: Tensor) -> None:
        """Take in the embeddings [B, t, C] of the next t columns."""

    def learn(self, layer: int, h_in: Tensor, h_out: Tensor, start: int) -> None:
        """Take in a layer's hidden states around its attention."""

    def plan(self) -> BitPlan | None:
        """The finished plan, or None before the search."""


@dataclass(frozen=True)
class RequestStats:
    """What planning and packing one request took and decided.

    search_s, pack_s: seconds. plan: None before the search. scores: per row [W_b] float32, or None for a method that
    looks at nothing. sensitivity: s_l per layer. bits: share of the visual tokens (mean over layers, K and V) at each
    bit-width in use, widest first; those outside whole windows count as 16 bit, dropped ones as 0.
    """

    search_s: float
    pack_s: float
    plan: BitPlan | None
    scores: list[Tensor] | None
    sensitivity: tuple[float, ...]
    bits: dict[int, float] = field(default_factory=dict)


class PackedCache(RequestCache):
    """Mixed-precision KV cache of one request or batch of requests, whose visual tokens are packed by a plan."""

    layers: list[PackedCacheLayer]

    def __init__(
        self,
        request: CacheRequest,
        planner: Planner,
        layers: int,
        origin: Callable[[], CacheOrigin],
        pixels: Mapping[str, str],
    ) -> None:
        """origin, pixels: see `RequestCache`."""
        super().__init__(layers=[PackedCacheLayer(index, request) for index in range(layers)])
        self.request = request
        self.planner = planner
        self.origin = origin
        self.pixels = dict(pixels)

    def observe(self, embeds: Tensor) -> None:
        self.planner.observe(embeds)

    def rows_per_layer(self) -> list[tuple[int, ...] | None]:
        return [self.request.bits(layer) for layer in range(len(self.layers))]

    def way_back(self, columns: int) -> int:
        return columns  # what follows the video is kept in 16 bit, in order

    def go_back(self, columns: int, prompt: Prompt) -> None:
        times = self.layers[0].rows() // prompt.batch
        if times > 1:  # beams and several answers of a prompt differ after its end only
            self.batch_select_indices(torch.arange(prompt.batch) * times)
        for layer in self.layers:  # a pass that was interrupted leaves some layers ahead of others
            layer.crop(columns - layer.get_seq_length())
        self.request.prompt = prompt

    def nbytes(self) -> KVBytes:
        """Bytes held now, by kind; the sum equals the bytes of the storages."""
        return sum((layer.nbytes() for layer in self.layers), KVBytes())

    def predicted_nbytes(self) -> int:
        """Bytes by formula: b / 8 a code, 4 a group, 2 an unquantized element; 0 before the layers are packed."""
        return sum(layer.stored.predicted() for layer in self.layers if layer.stored is not None)

    @property
    def packed(self) -> bool:
        return all(layer.stored is not None for layer in self.layers)

    @property
    def stats(self) -> RequestStats:
        """Times, plan and shares so far."""
        return RequestStats(
            search_s=self.planner.search_s,
            pack_s=sum(layer.pack_s for layer in self.layers),
            plan=self.planner.plan(),
            scores=self.planner.scores,
            sensitivity=self.planner.sensitivity,
            bits=self._shares(),
        )

    def _shares(self) -> dict[int, float]:
        total = sum(len(row) for row in self.request.prompt.visual_positions)
        rows = [self.request.bits(index) for index in range(len(self.layers))]
        if total == 0 or any(row is None for row in rows):
            return {}
        if self.request.recipe.drops_visual:
            return {0: 1.0}
        recipe, tokens = self.request.recipe, Counter[int]()  # of K and of V
        for row in rows:
            if not row:
                continue
            held = (self.request.prompt.windows(recipe.window_size)[..., 0] >= 0).sum(0).tolist()  # rows with window w
            for width, count in zip(row, held, strict=True):
                tokens[width] += count * recipe.window_size
                tokens[recipe.v_bits(width)] += count * recipe.window_size
        every = 2 * total * len(rows)
        tokens[16] += every - tokens.total()
        return {width: tokens[width] / every for width in sorted(tokens, reverse=True) if tokens[width]}
