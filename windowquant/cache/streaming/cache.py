"""The streaming cache of one request, behind transformers' `Cache` interface."""

from collections import Counter
from collections.abc import Callable, Mapping

import torch

from windowquant.cache.kv_bytes import KVBytes, tensor_bytes
from windowquant.cache.origin import CacheOrigin
from windowquant.cache.packed_cache import RequestStats
from windowquant.cache.request_cache import RequestCache
from windowquant.cache.streaming.accounting import held_bytes, visual_bytes, visual_widths
from windowquant.cache.streaming.layer import StreamingLayer, StreamRequest
from windowquant.errors import UserError
from windowquant.models import Prompt


class StreamingCache(RequestCache):
    """K and V that are coded as they age; every token counts, of text as of the video.

    Codes cannot be turned back into tokens. So a cache goes back to one moment only, the end of the video that it was
    made for by `Bound.encode`: the tokens that are exact there stay so, beside the codes that they get later. That
    takes as much memory as the method's exact window at most.
    """

    layers: list[StreamingLayer]

    def __init__(
        self, request: StreamRequest, layers: int, origin: Callable[[], CacheOrigin], pixels: Mapping[str, str]
    ) -> None:
        """origin, pixels: see `RequestCache`."""
        super().__init__(layers=[StreamingLayer(index, request) for index in range(layers)])
        self.request = request
        self.origin = origin
        self.pixels = dict(pixels)

    @property
    def packed(self) -> bool:
        return all(layer.groups for layer in self.layers)

    def rows_per_layer(self) -> list[None]:
        return [None] * len(self.layers)  # there is no plan

    def mark(self) -> None:
        """See `RequestCache.mark`. UserError if a row of the batch begins only after the others' videos."""
        if not self.packed:
            raise UserError(
                "A row of the batch has no image and no video, and begins after the end of the others'; encode the "
                "rows that have one."
            )
        for layer in self.layers:
            layer.mark()

    def way_back(self, columns: int) -> int:
        marked = self.layers[0].marked
        if marked is None:
            raise UserError(
                "The cache codes tokens as they age, which cannot be undone, and its state at the video's end was not "
                "kept; make it with encode(inputs) to ask several questions."
            )
        return marked

    def go_back(self, columns: int, prompt: Prompt) -> None:
        sources, wanted = self.layers[0].sources(), list(range(prompt.batch))
        if not set(wanted) <= set(sources):
            raise UserError("The cache has lost a row of the prompt; make a new one with encode(inputs).")
        if sources != wanted:  # beams and several answers of a prompt differ after its end only
            self.batch_select_indices(torch.tensor([sources.index(row) for row in wanted]))
        for layer in self.layers:
            layer.go_back()
        self.request.prompt = prompt

    def nbytes(self) -> KVBytes:
        total = KVBytes()
        for layer in self.layers:
            total += held_bytes(layer.groups, self.request.prompt)
            total += KVBytes(tail=tensor_bytes(*(x for x in (layer.keys, layer.values) if x is not None)))
        return total

    def predicted_nbytes(self) -> int:
        return round(sum(g.k.predicted() + g.v.predicted() for layer in self.layers for g in layer.groups))

    def visual_bits(self) -> float:
        """Bits held per element of K and V of the visual tokens, their share of the metadata included; NaN for none."""
        held = elements = 0.0
        for layer in self.layers:
            held += visual_bytes(layer.groups, self.request.prompt)
            for group in layer.groups:
                visual = int(self.request.prompt.visual[list(group.sources)].sum())
                elements += visual * (group.k.token_elements + group.v.token_elements)
        return 8 * held / elements if elements else float("nan")

    @property
    def stats(self) -> RequestStats:
        """Time of coding what the prefill left, and the shares of the visual tokens now; there is no plan."""
        tokens = Counter[int]()
        for layer in self.layers:
            tokens += visual_widths(layer.groups, self.request.prompt)
        shares = {width: tokens[width] / tokens.total() for width in sorted(tokens, reverse=True) if tokens[width]}
        return RequestStats(0.0, sum(layer.pack_s for layer in self.layers), None, None, (), shares)
