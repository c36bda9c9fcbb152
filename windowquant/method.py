"""What a method is, what binding it to a model gives, and how methods are found by name."""

from dataclasses import dataclass, fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.bound import Bound
from windowquant.cache.recipe import KV_DTYPES, Recipe
from windowquant.core.plan import BitPlan, KVShape, v_bits_of
from windowquant.core.quantizer import Granularity, ZeroPoint
from windowquant.errors import UserError
from windowquant.models import Embeddings, Prompt

__all__ = ["Bound", "Method", "Status", "get_method", "method_names"]

Status = Literal["paper", "official", "variant", "control"]
"""What a row of a table is: the paper's own method, a published method as its authors run it (the class names what
deviates), a published idea where the publication leaves open what becomes of a KV cache, or a control."""

_METHODS: dict[str, type["Method"]] = {}


@dataclass(frozen=True)
class Method:
    """A way to store the KV cache: a frozen dataclass of hyper-parameters with one verb to override, `bits`.

    Used in three lines on a stock `from_pretrained` model, and undone on leaving the block::

        with WindowQuant(alpha=2.0).bind(model, processor) as wq:
            out = model.generate(**inputs, cache=wq.new_cache(inputs), max_new_tokens=32)

    Older versions of transformers call the argument `past_key_values`; `wq.cache_keyword` is the name the model takes.

    A subclass with a `name` of its own is found by `get_method`; one in `baselines/` needs no other registration.

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

    name: ClassVar[str] = ""
    declared: ClassVar[Status] = "variant"
    drops_visual: ClassVar[bool] = False
    """Whether K and V of visual tokens are discarded once they are prefilled."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _METHODS[cls.name] = cls

    def __post_init__(self) -> None:
        if self.window_size < 1:
            raise UserError(f"window_size is {self.window_size}; set it to 1 or more.")
        self._check("granularity", get_args(Granularity))
        self._check("zero_point", get_args(ZeroPoint))
        self._check("kv_dtype", KV_DTYPES)

    @property
    def status(self) -> Status:
        """What tables call this method, with these hyper-parameters."""
        return self.declared

    def _check(self, field: str, known: tuple[str, ...]) -> None:
        if getattr(self, field) not in known:
            raise UserError(f"{field} is {getattr(self, field)!r}; use one of {', '.join(known)}.")

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        """Tie the method to a loaded model; the result is a context manager, within which caches can be made.

        `processor` is not needed by any method here and may be None. Raises UserError for a model whose visual tokens
        cannot be located, and for one that is bound already.
        """
        return Bound(self, model, processor)

    def frames(self, frames: int) -> int:
        """How many frames of each video an evaluation is to show, where the model's settings say `frames`."""
        return frames

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

    def described(self) -> str:
        """Name and hyper-parameters, for records: `windowquant(alpha=2.0, ...)`."""
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{self.name}({values})"


def _load_methods() -> dict[str, type[Method]]:
    """Import every module that defines methods; they register themselves."""
    import baselines

    import_module("windowquant.windowquant_method")
    for module in iter_modules(baselines.__path__):
        import_module(f"baselines.{module.name}")
    return _METHODS


def method_names() -> list[str]:
    """Every known method name, sorted."""
    return sorted(_load_methods())


def get_method(name: str, **params: Any) -> Method:
    """The method called `name` with the given hyper-parameters.

    Raises UserError for an unknown name (listing the known ones), an unknown hyper-parameter, or a value out of range.
    """
    methods = _load_methods()
    if name not in methods:
        raise UserError(f"Unknown method {name!r}; known methods: {', '.join(sorted(methods))}.")
    known = [field.name for field in fields(methods[name])]
    for param in params:
        if param not in known:
            raise UserError(f"Method {name!r} has no hyper-parameter {param!r}; it has {', '.join(known)}.")
    return methods[name](**params)
