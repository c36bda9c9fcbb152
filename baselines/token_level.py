"""Mixed precision per token, as MiKV (https://arxiv.org/abs/2402.18096) and its kin: what windows are compared with."""

import time
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from windowquant.attention import windowquant_attention, windowquant_mask
from windowquant.bound import Bound
from windowquant.cache.fingerprint import pixel_prints
from windowquant.cache.packed_cache import PackedCache
from windowquant.core.importance import received_attention, tiers
from windowquant.core.plan import BitPlan
from windowquant.core.quantizer import Granularity, ZeroPoint
from windowquant.core.search import majority_vote
from windowquant.core.similarity import window_scores
from windowquant.errors import UserError
from windowquant.models import Embeddings, Prompt
from windowquant.timing import synchronize
from windowquant.window_bound import WindowBound
from windowquant.window_method import WindowMethod

Importance = Literal["attention", "similarity"]
_WIDTHS = (16, 4, 2)
_NAME = "windowquant_token_level"
_watched: "WeakKeyDictionary[nn.Module, partial[None]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class TokenLevel(WindowMethod):
    """Variant: every visual token has bits of its own in each layer, by its importance; frozen after the prefill.

    importance: "attention" is what a token receives in its layer's prefill, summed over queries and heads (the query
    heads of a group too), as in H2O; it is known only once the layer has attended, and under the `context` protocol
    it knows nothing of the question. "similarity" is WindowQuant's score of a single token, the same in all layers.
    fp16_share, int4_share: of a request's visual tokens, the most important ones; the rest is in INT2.

    Codes are per token and head, asymmetric with the minimum kept. MiKV (no official code) differs: groups of half a
    head, tiers per head, recent tokens in the top tier, text tokens too, and a balancer of K's channels, which is not
    built here; its ratio of 0.2 with the rest in INT2 is fp16_share 0.2, int4_share 0. In a batch, the requests vote.
    """

    window_size: int = 1
    granularity: Granularity = "token"
    zero_point: ZeroPoint = "float"
    importance: Importance = "attention"
    fp16_share: float = 0.2
    int4_share: float = 0.3

    name: ClassVar[str] = "token_level"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("importance", get_args(Importance))
        if self.window_size != 1 or self.granularity == "window_channel":
            raise UserError(
                "token_level gives each token bits of its own; leave window_size at 1, and granularity at token or "
                "coarser."
            )
        if min(self.fp16_share, self.int4_share) < 0 or self.fp16_share + self.int4_share > 1:
            raise UserError(
                f"fp16_share is {self.fp16_share} and int4_share {self.int4_share}; set both to 0 or more, and their "
                "sum to 1 at most."
            )

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        if self.importance == "similarity":
            return super().bind(model, processor)
        return AttendedBound(self, model, processor)

    def scores(self, embeddings: Embeddings) -> list[Tensor] | None:
        """Similarity of each token to the prompt's text, as WindowQuant's of a window of one token."""
        pairs = zip(embeddings.visual, embeddings.text, strict=True)
        return [window_scores(v, t, 1) if len(v) else v.new_zeros(0).float() for v, t in pairs]

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        assert scores is not None
        return self.voted(scores).expand(len(sensitivity), -1)

    def voted(self, scores: list[Tensor]) -> Tensor:
        """Bits [1, W] from the scores [W_b] of each row's visual tokens in one layer."""
        return majority_vote([tiers(row, (self.fp16_share, self.int4_share), _WIDTHS)[None] for row in scores])


class AttentionPlanner:
    """Plans a layer once it has attended to all visual tokens (`windowquant.cache.packed_cache.Planner`)."""

    scores: list[Tensor] | None = None

    def __init__(self, method: TokenLevel, prompt: Prompt, layers: int) -> None:
        self.search_s, self.sensitivity = 0.0, (0.0,) * layers
        self._method, self._prompt = method, prompt
        self._received = [torch.zeros(prompt.batch, 0) for _ in range(layers)]
        self._rows: list[tuple[int, ...] | None] = [() if prompt.visual_end == 0 else None] * layers

    def row(self, layer: int) -> tuple[int, ...] | None:
        return self._rows[layer]

    def observe(self, embeds: Tensor) -> None:
        """Nothing to learn from embeddings."""

    def learn(self, layer: int, h_in: Tensor, h_out: Tensor, start: int) -> None:
        """Nothing to learn from hidden states."""

    @torch.no_grad()
    def attended(self, layer: int, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        """Take in a prefill's query [B or k * B, Hq, t, D] and all keys so far; of k copies the first is looked at."""
        synchronize(query.device)
        start, prompt, seen = time.perf_counter(), self._prompt, key.shape[2]
        times = query.shape[0] // prompt.batch
        picked = mask[::times] if mask is not None and mask.shape[0] > 1 else mask
        counted = prompt.attended[:, seen - query.shape[2] : seen]
        received = received_attention(query[::times], key[::times], picked, scaling, counted).cpu()
        before = self._received[layer]
        received[:, : before.shape[1]] += before
        self._received[layer] = received
        if seen >= prompt.visual_end:
            rows = [row[at] for row, at in zip(received, prompt.visual_positions, strict=True)]
            self._rows[layer] = tuple(self._method.voted(rows)[0].tolist())
        self.search_s += time.perf_counter() - start

    def plan(self) -> BitPlan | None:
        known = [row for row in self._rows if row is not None]
        return self._method._planned(torch.tensor(known)) if len(known) == len(self._rows) else None


class AttendedBound(WindowBound):
    """Token-level precision by attention, at work on a model."""

    method: TokenLevel

    def __init__(self, method: TokenLevel, model: PreTrainedModel, processor: object = None) -> None:
        super().__init__(method, model, processor)
        self._running: PackedCache | None = None

    def new_cache(self, inputs: Mapping[str, Any]) -> Cache:
        """See `Bound.new_cache`."""
        self._check_active()
        prompt = self.adapter.prompt(self.model, inputs)
        if prompt.visual_end == 0:
            warnings.warn("The prompt holds no visual tokens, so nothing is quantized.", stacklevel=2)
        return self.cache_of(
            prompt, AttentionPlanner(self.method, prompt, self.layers), pixel_prints(self.adapter, inputs)
        )

    def _install(self, undo: ExitStack) -> None:
        super()._install(undo)
        self.model.set_attn_implementation({self.adapter.text_config_key: _NAME})
        for index, layer in enumerate(self.adapter.decoder_layers(self.model)):
            _watched[layer.self_attn] = partial(self._attended, index)
            undo.callback(_watched.pop, layer.self_attn)

    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._observe(module, args, kwargs)
        cache = self._cache_in(kwargs)
        self._running = cache if isinstance(cache, PackedCache) else None

    def _attended(self, layer: int, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
        cache = self._running
        if cache is not None and isinstance(cache.planner, AttentionPlanner) and cache.layers[layer].stored is None:
            cache.planner.attended(layer, query, key, mask, scaling)
            cache.layers[layer].pack_if_ready()


def _attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    out = windowquant_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    if isinstance(key, Tensor) and module in _watched:
        _watched[module](query, key, attention_mask, scaling)
    return out


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, windowquant_mask)
