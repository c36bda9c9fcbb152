"""Methods that give each window of visual tokens a bit-width, after the prefill and once for all."""

from dataclasses import dataclass, replace
from typing import ClassVar, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.bound import Bound
from windowquant.cache.recipe import KV_DTYPES, Recipe
from windowquant.core.plan import BitPlan, KVShape, v_bits_of
from windowquant.core.quantizer import Granularity, ZeroPoint
from windowquant.errors import UserError
from windowquant.kernels import check_backend
from windowquant.method import Method
from windowquant.models import Embeddings, Prompt
from windowquant.window_bound import WindowBound


@dataclass(frozen=True)
class WindowMethod(Method):
    """A plan for the visual tokens, and text in 16 bit; a subclass says the plan, in `bits`.

    window_size: visual tokens a window (S). granularity, zero_point: see `windowquant.core.quantizer`.
    kv_dtype: dtype of what is not quantized, and of scales: "auto" (the model's if that has 16 bits, else float16) or
    "model" (the model's, whatever it is). backend: attention kernel by name, None for the one that suits the device.
    Raises UserError for a value out of range.
    """

    window_size: int = 32
    granularity: Granularity = "window_channel"
    zero_point: ZeroPoint = "integer"
    kv_dtype: str = "auto"
    backend: str | None = None

    drops_visual: ClassVar[bool] = False
    """Whether K and V of visual tokens are discarded once they are prefilled."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window_size < 1:
            raise UserError(f"window_size is {self.window_size}; set it to 1 or more.")
        self._check("granularity", get_args(Granularity))
        self._check("zero_point", get_args(ZeroPoint))
        self._check("kv_dtype", KV_DTYPES)
        check_backend(self.backend)

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        return WindowBound(self, model, processor)

    def sensitivity_of(self, model: PreTrainedModel) -> tuple[float, ...] | None:
        """s_l of each layer [L] (paper, equation 9), or None if it is to be taken from each request's own prefill."""
        return (0.0,) * int(model.config.get_text_config().num_hidden_layers)

    def scores(self, embeddings: Embeddings) -> list[Tensor] | None:
        """Score of each window of each row, [W_b] float32; None for a method that does not look at the content."""
        return None

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        """The plan: integer [L, W], bits of each layer (L = len(sensitivity)) and window (W = the most of any row).

        W = 0 cuts no windows at all: everything stays in 16 bit.
        """
        raise NotImplementedError

    def plan(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor, kv: KVShape) -> BitPlan:
        """What `bits` says, as the plan of the request. kv: KV heads and channels of the model's layers."""
        return self._planned(self.bits(prompt, scores, sensitivity))

    def _planned(self, bits: Tensor, alpha: float | None = None) -> BitPlan:
        bits, v_widths = bits.to("cpu", torch.int8), self.recipe().v_widths
        v_bits = v_bits_of(bits, v_widths) if v_widths else None
        return BitPlan.from_tensor(bits, self.window_size, self.described(), v_bits, alpha)

    def recipe(self) -> Recipe:
        """How the cache stores what the plan says."""
        return Recipe(self.window_size, self.granularity, self.zero_point, self.kv_dtype, self.drops_visual)

    def stored(self) -> str:
        return replace(self, backend=None).described()
