"""The streaming cache of one request, behind transformers' `Cache` interface."""

from collections import Counter

from windowquant.cache.kv_bytes import KVBytes, tensor_bytes
from windowquant.cache.packed_cache import RequestStats
from windowquant.cache.request_cache import RequestCache
from windowquant.cache.streaming.accounting import held_bytes, visual_bytes, visual_widths
from windowquant.cache.streaming.layer import StreamingLayer, StreamRequest


class StreamingCache(RequestCache):
    """K and V that are coded as they age; every token counts, of text as of the video."""

    layers: list[StreamingLayer]

    def __init__(self, request: StreamRequest, layers: int) -> None:
        super().__init__(layers=[StreamingLayer(index, request) for index in range(layers)])
        self.request = request

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
