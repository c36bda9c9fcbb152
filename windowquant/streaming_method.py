"""Methods that code every token, of text as of the video, as it ages: what they say, and their binding to a model."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from windowquant.bound import Bound
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
    Raises UserError if an option of windows is set, for there are none.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in dataclasses.fields(Method):
            if field.name != "kv_dtype" and getattr(self, field.name) != field.default:
                raise UserError(f"{self.name} has no {field.name}, for it cuts no windows; leave it out.")

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

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        return torch.zeros(len(sensitivity), 0)  # no windows

    def described(self) -> str:
        shared = {field.name for field in dataclasses.fields(Method)} - {"kv_dtype"}
        names = [field.name for field in dataclasses.fields(self) if field.name not in shared]
        return f"{self.name}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


class StreamingBound(Bound):
    """A streaming method at work on a model."""

    def __init__(self, method: StreamingMethod, model: PreTrainedModel, processor: object = None) -> None:
        super().__init__(method, model, processor)
        self._schemes = method.schemes(model, kv_shape(self.text_config))
        self._angles = self._rotary_angles() if method.before_rope else None

    def new_cache(self, inputs: Mapping[str, Any]) -> Cache:
        """An empty cache for these processor outputs; see `Bound.new_cache`. Padding must be on the left."""
        self._check_active()
        prompt = self.adapter.prompt(self.model, inputs)
        dtype = self.method.recipe().storage_dtype
        request = StreamRequest(prompt, left_padding(prompt), self._schemes, dtype, self._check_active, self._angles)
        return StreamingCache(request, self.layers)

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
