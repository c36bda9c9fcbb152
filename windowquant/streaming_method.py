"""Methods that code every token, of text as of the video, as it ages: what they say, and their binding to a model."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from windowquant.bound import Bound
from windowquant.cache.fingerprint import pixel_prints
from windowquant.cache.origin import CacheOrigin
from windowquant.cache.packed_cache import Planner
from windowquant.cache.recipe import KV_DTYPES, storage_dtype
from windowquant.cache.streaming.cache import StreamingCache
from windowquant.cache.streaming.layer import StreamRequest, left_padding
from windowquant.cache.streaming.rotation import Angles
from windowquant.cache.streaming.track import Scheme
from windowquant.core.plan import KVShape
from windowquant.errors import UserError
from windowquant.method import Method
from windowquant.models import Prompt
from windowquant.planning import kv_shape

_CHANGING = ("dynamic", "longrope")  # the angle of a position depends on how long the prompt is
Schemes = Callable[[int], tuple[Scheme, Scheme]]


@dataclass(frozen=True)
class StreamingMethod(Method):
    """Keeps the newest tokens exact and codes the others, without windows and without a plan.

    The prefill (all columns up to the last visual one, or the whole prompt if it comes in one piece) is exact; then
    its tokens are coded as the method's rules say, and every later token as it ages. A subclass says `schemes`.

    kv_dtype: dtype of what is not coded, and of scales, as in `window_method.WindowMethod`.
    """

    kv_dtype: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("kv_dtype", KV_DTYPES)

    @abstractmethod
    def schemes(self, model: PreTrainedModel, shape: KVShape) -> Schemes:
        """How layer l keeps its K and its V; shape: KV heads and channels of the model's layers.

        Raises UserError where the method cannot be applied to them.
        """

    @property
    def before_rope(self) -> bool:
        """Whether K is coded as it was before RoPE."""
        return False

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        return StreamingBound(self, model, processor)


class StreamingBound(Bound):
    """A streaming method at work on a model."""

    method: StreamingMethod

    def __init__(self, method: StreamingMethod, model: PreTrainedModel, processor: object = None) -> None:
        super().__init__(method, model, processor)
        self._schemes = method.schemes(model, kv_shape(self.text_config))
        self._angles = self._rotary_angles() if method.before_rope else None

    def new_cache(self, inputs: Mapping[str, Any]) -> Cache:
        """An empty cache for these processor outputs; see `Bound.new_cache`. Padding must be on the left."""
        self._check_active()
        return self._empty(self.adapter.prompt(self.model, inputs), pixel_prints(self.adapter, inputs))

    def cache_of(self, prompt: Prompt, planner: Planner, pixels: Mapping[str, str]) -> StreamingCache:
        """An empty cache for a prompt; there is nothing to plan."""
        return self._empty(prompt, pixels)

    def _empty(self, prompt: Prompt, pixels: Mapping[str, str]) -> StreamingCache:
        dtype = partial(storage_dtype, self.method.kv_dtype)
        request = StreamRequest(prompt, left_padding(prompt), self._schemes, dtype, self._check_active, self._angles)
        return StreamingCache(request, self.layers, lambda: self.origin, pixels)

    @cached_property
    def origin(self) -> CacheOrigin:
        """As `Bound.origin`, and the codecs: what a calibration says of them is not in the hyper-parameters."""
        origin, digest = super().origin, hashlib.sha256()
        for scheme in (scheme for layer in range(self.layers) for scheme in self._schemes(layer)):
            digest.update(scheme.codec.identity())
        return replace(origin, method=f"{origin.method} with codes {digest.hexdigest()[:8]}")

    def _rotary_angles(self) -> Angles:
        """cos and sin as the model's own RoPE gives them. UserError for a RoPE that cannot be taken off."""
        rotary = getattr(self.adapter.language_model(self.model), "rotary_emb", None)
        kind = getattr(rotary, "rope_type", "default")
        if rotary is None or kind in _CHANGING:
            raise UserError(
                f"The rotation of this model's keys ({'none found' if rotary is None else kind}) cannot be taken off; "
                "set pre_rope to false."
            )

        @torch.no_grad()
        def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = rotary(torch.empty(0, device=self.device), positions.to(self.device))
            return cos, sin

        return angles
