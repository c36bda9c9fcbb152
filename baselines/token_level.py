"""Mixed precision per token, as MiKV (https://arxiv.org/abs/2402.18096) and its kin: what windows are compared with."""

import time
import warnings
from collections.abc import Mapping, Sequence
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
from windowquant.cache.packed_cache import PackedCache, Planner
from windowquant.cache.request import CacheRequest
from windowquant.cache.tiered import BalancedView, TieredCache, Tiers
from windowquant.core.importance import balance, ranked, received_attention, tiers
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
    fp16_share, int4_share: of a request's visual tokens, the most important ones; the rest is in INT2. recent_share:
    the newest ones, which belong to the 16-bit share whatever their importance. per_head: each KV head has an
    importance of its own, from its query heads; the plan's windows are then its tokens by rank. balance: each channel
    of K is multiplied by sqrt(max |q| / max |k|) of its head in the prefill, the largest over the head's query heads,
    and q divided by it: what of K is stored, and is to be stored, is balanced. Both need importance "attention".

    Codes are per token and head, asymmetric with the minimum kept. MiKV has no official code. Its ratio of 0.2, half of
    it recent tokens, with the rest in INT2 is fp16_share 0.2, recent_share 0.1, int4_share 0, with per_head and balance
    (conf/method/mikv.yaml). It differs in that its groups are half a head (scales here are per head and token in every
    kernel), its tiers take in text (here always in 16 bit), and it demotes tokens as it decodes (here the tiers of the
    prefill stay). In a batch, the requests vote.
    """

    window_size: int = 1
    granularity: Granularity = "token"
    zero_point: ZeroPoint = "float"
    importance: Importance = "attention"
    fp16_share: float = 0.2
    int4_share: float = 0.3
    recent_share: float = 0.0
    per_head: bool = False
    balance: bool = False

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
        if not 0 <= self.recent_share <= self.fp16_share:
            raise UserError(
                f"recent_share is {self.recent_share}; set it to 0 or more, and to fp16_share ({self.fp16_share}), of "
                "which it is a part, at most."
            )
        for field in ("per_head", "balance"):
            if not isinstance(getattr(self, field), bool):
                raise UserError(f"{field} is {getattr(self, field)!r}; set it to true or false.")
            if getattr(self, field) and self.importance != "attention":
                raise UserError(f"{field} is seen in the attention of the prefill; set importance to attention.")

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
        return self.voted([ranked(row, self.recent_share) for row in scores]).expand(len(sensitivity), -1)

    def voted(self, ranks: Sequence[Tensor]) -> Tensor:
        """Bits [1, W] from the ranking [W_b] of each row's visual tokens in one layer."""
        rows = []
        for order in ranks:
            bits = self.by_rank(len(order))
            rows.append(torch.empty_like(bits).scatter_(0, order.cpu(), bits)[None])
        return majority_vote(rows)

    def by_rank(self, count: int) -> Tensor:
        """Bits [count] of the tokens of a row from the most important to the least."""
        return tiers(count, (self.fp16_share, self.int4_share), _WIDTHS)


class AttentionPlanner:
    """Plans a layer once it has attended to all visual tokens (`windowquant.cache.packed_cache.Planner`)."""

    scores: list[Tensor] | None = None

    def __init__(self, method: TokenLevel, prompt: Prompt, layers: int) -> None:
        self.search_s, self.sensitivity = 0.0, (0.0,) * layers
        self._method, self._prompt = method, prompt
        self._received: list[Tensor | None] = [None] * layers
        self._queries: list[Tensor | None] = [None] * layers
        self._rows: list[tuple[int, ...] | None] = [() if prompt.visual_end == 0 else None] * layers
        self._tiers: list[Tiers | None] = [None] * layers

    def row(self, layer: int) -> tuple[int, ...] | None:
        return self._rows[layer]

    def tiers(self, layer: int) -> Tiers | None:
        """What is to be done to a layer's tokens before they are packed; None while it is not known."""
        return self._tiers[layer]

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
        query, key = query[::times], key[::times]
        picked = mask[::times] if mask is not None and mask.shape[0] > 1 else mask
        counted = _attended(prompt, seen)[:, seen - query.shape[2] :]
        received = received_attention(query, key, picked, scaling, counted).cpu()
        before = self._received[layer]
        if before is not None:
            received[..., : before.shape[2]] += before
        self._received[layer] = received
        if self._method.balance:
            largest = _peaks(query, counted).unflatten(1, (key.shape[1], -1)).amax(2)
            earlier = self._queries[layer]
            self._queries[layer] = largest if earlier is None else torch.maximum(largest, earlier)
        if seen >= prompt.visual_end:
            self._decide(layer, received, key)
        self.search_s += time.perf_counter() - start

    def _decide(self, layer: int, received: Tensor, key: Tensor) -> None:
        method, prompt = self._method, self._prompt
        scores = received if method.per_head else received.sum(1, keepdim=True)
        rows = zip(scores, prompt.visual_positions, strict=True)
        ranks = tuple(ranked(row[:, at], method.recent_share) for row, at in rows)
        if method.per_head:
            voted = majority_vote([method.by_rank(own.shape[1])[None] for own in ranks])
        else:
            voted = method.voted([own[0] for own in ranks])
        self._rows[layer] = tuple(voted[0].tolist())
        self._tiers[layer] = Tiers(ranks if method.per_head else None, self._factors(layer, key))

    def _factors(self, layer: int, key: Tensor) -> Tensor | None:
        queries = self._queries[layer]
        if queries is None:
            return None
        keys = _peaks(key, _attended(self._prompt, key.shape[2]))
        dtype = self._method.recipe().storage_dtype(key.dtype)
        return balance(queries, keys).to(dtype).unsqueeze(2)

    def plan(self) -> BitPlan | None:
        known = [row for row in self._rows if row is not None]
        return self._method._planned(torch.tensor(known)) if len(known) == len(self._rows) else None


def _attended(prompt: Prompt, columns: int) -> Tensor:
    """Which of the first `columns` columns hold tokens, bool [B, columns]; those after the prompt do not count."""
    return torch.nn.functional.pad(prompt.attended[:, :columns], (0, max(0, columns - prompt.length)))


def _peaks(x: Tensor, counted: Tensor) -> Tensor:
    """Largest absolute value in each channel of x [B, heads, t, D] over the tokens that count, bool [B, t]."""
    return (x.abs() * counted.to(x.device)[:, None, :, None]).amax(2)


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
        planner = AttentionPlanner(self.method, prompt, self.layers)
        return self.cache_of(prompt, planner, pixel_prints(self.adapter, inputs))

    def cache_of(self, prompt: Prompt, planner: Planner, pixels: Mapping[str, str]) -> PackedCache:
        """See `WindowBound.cache_of`."""
        request = CacheRequest(prompt, self.recipe(), planner.row, self._attend, self._check_active, self.layers)
        decided = planner.tiers if isinstance(planner, AttentionPlanner) else _read_again
        return TieredCache(request, planner, self.layers, lambda: self.origin, pixels, decided)

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


def _read_again(layer: int) -> Tiers | None:
    """A cache that was saved is packed already."""
    return None


def _attention(
    module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    if isinstance(key, BalancedView):
        query, key, value = key.balanced(query), key.view, key.view
    out = windowquant_attention(module, query, key, value, attention_mask, scaling, **kwargs)
    if isinstance(key, Tensor):
        _watch(module, query, key, attention_mask, scaling)
    return out


@torch.compiler.disable  # it would compile in which layer it was
def _watch(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> None:
    if module in _watched:
        _watched[module](query, key, mask, scaling)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, windowquant_mask)
