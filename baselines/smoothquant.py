"""SmoothQuant (https://arxiv.org/abs/2211.10438), applied to the KV cache: outlier channels moved out of K and V."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor, nn
from transformers import PreTrainedModel

from baselines.uniform import Uniform
from windowquant.bound import Bound
from windowquant.cache.origin import CacheOrigin
from windowquant.cache.recipe import Recipe
from windowquant.calibrate.states import before_rope
from windowquant.calibrate.statistics import Statistics, load_statistics
from windowquant.core.quantizer import Granularity, ZeroPoint, check_symmetric
from windowquant.errors import UserError
from windowquant.method import Status
from windowquant.window_bound import WindowBound

Smoothing = Literal["folded", "none"]
Scales = Literal["dynamic", "static"]
_SMALLEST = 1e-5  # the official floor of maxima and factors


@dataclass(frozen=True)
class SmoothQuant(Uniform):
    """Variant: SmoothQuant quantizes weights and activations to 8 bits, and leaves open what becomes of the KV cache.

    Smoothing divides channel j of K by s_j = max|K_j|^m / max|Q_j|^(1 - m) and multiplies Q by it; the maxima are
    calibrated, Q's over the query heads that share the KV head. The two channels that RoPE rotates together share their
    factor, so that it commutes with the rotation. Likewise for V, with the output projection's weights in place of Q.
    Without quantization nothing changes (but for rounding in the model's dtype). The factors are put onto the
    projections' outputs by hooks, not into weights, and are gone on leaving the block.

    Then K and V of whole windows are rounded to symmetric codes, per token over all heads as in the official simulation
    of activations; text and the tokens outside whole windows stay in 16 bit. Keys are coded after RoPE (there: before).

    migration: m, from 0 to 1; 0.5 by default as there. smoothing: "folded" or "none". scales: "dynamic" (each group's
    own) or "static" (one a layer for K and one for V, calibrated; granularity "tensor"). statistics: "calibrated" (the
    file beside the checkpoint) or a file of `windowquant.calibrate.statistics`.
    """

    bits_per_code: int = 8
    granularity: Granularity = "token_all"
    zero_point: ZeroPoint = "symmetric"
    migration: float = 0.5
    smoothing: Smoothing = "folded"
    scales: Scales = "dynamic"
    statistics: str = "calibrated"

    name: ClassVar[str] = "smoothquant"
    declared: ClassVar[Status] = "variant"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("smoothing", get_args(Smoothing))
        self._check("scales", get_args(Scales))
        if self.zero_point == "symmetric":
            check_symmetric(self.bits_per_code)
        if not 0 <= self.migration <= 1:
            raise UserError(f"migration is {self.migration}; set it to a number from 0 to 1.")
        if self.scales == "static" and (self.zero_point, self.granularity) != ("symmetric", "tensor"):
            raise UserError(
                "scales is static, which gives each layer one scale for K and one for V; set zero_point to symmetric "
                "and granularity to tensor, or scales to dynamic."
            )

    def stored(self) -> str:
        return replace(self, backend=None, statistics="calibrated").described()

    @property
    def needs_statistics(self) -> bool:
        """Whether anything calibrated is used."""
        return self.smoothing == "folded" or self.scales == "static"

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        """See `Method.bind`; reads the statistics, and raises UserError if they are missing or not this model's."""
        return SmoothedBound(self, model, processor)


@dataclass(frozen=True)
class SmoothQuantInt4(SmoothQuant):
    """Variant: INT4. SmoothQuant itself stops at 8 bits."""

    bits_per_code: int = 4

    name: ClassVar[str] = "smoothquant_int4"


@dataclass(frozen=True)
class SmoothQuantStatic(SmoothQuant):
    """Official reading 1 (S1), the real INT8 path for OPT: one static symmetric scale a layer for K, and one for V.

    The official smoothing changes the input of the projections, and so neither K nor V. Deviations: the prefill is
    exact, and text stays in 16 bit.
    """

    granularity: Granularity = "tensor"
    smoothing: Smoothing = "none"
    scales: Scales = "static"

    name: ClassVar[str] = "smoothquant_static"
    declared: ClassVar[Status] = "official"


@dataclass(frozen=True)
class SmoothQuantToken(SmoothQuant):
    """Official reading 2 (S2), the simulation with `quantize_bmm_input`: a symmetric INT8 scale a token, for all heads.

    Smoothing changes neither K nor V, as in S1. Deviations: keys are coded after RoPE (there: before), the prefill is
    exact, and text stays in 16 bit.
    """

    smoothing: Smoothing = "none"

    name: ClassVar[str] = "smoothquant_token"
    declared: ClassVar[Status] = "official"


def smoothing_factors(activations: Tensor, weights: Tensor, migration: float) -> Tensor:
    """s_j = a_j^m / w_j^(1 - m) of the largest activations a and weights w: any shape, floored as officially."""
    floored = weights.clamp(min=_SMALLEST).pow(1 - migration)
    return (activations.clamp(min=_SMALLEST).pow(migration) / floored).clamp(min=_SMALLEST)


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """What K and V of one layer are divided by, float32 [H, D]."""

    k: Tensor
    v: Tensor

    @classmethod
    def calibrated(cls, statistics: Statistics, layer: int, self_attn: Any, migration: float) -> "LayerFactors":
        """Factors of a layer from its calibrated maxima and the weights of its output projection."""
        keys, values = (statistics.peak(name)[layer] for name in ("key", "value"))
        queries = _over_query_heads(statistics.peak("query")[layer], len(keys))
        weight = self_attn.o_proj.weight.detach().float().abs().amax(0).cpu()
        outputs = _over_query_heads(weight.view(-1, keys.shape[1]), len(keys))
        paired = smoothing_factors(_over_pairs(keys), _over_pairs(queries), migration)
        return cls(paired, smoothing_factors(values, outputs, migration))


def _over_query_heads(x: Tensor, kv_heads: int) -> Tensor:
    """The largest of the query heads [Hq, D] that share a KV head: [H, D]."""
    return x.unflatten(0, (kv_heads, -1)).amax(1)


def _over_pairs(x: Tensor) -> Tensor:
    """The larger of the two channels that RoPE rotates together, j and j + D / 2, in place of both: [H, D]."""
    return x.unflatten(-1, (2, -1)).amax(-2, keepdim=True).expand(-1, 2, -1).flatten(-2)


class SmoothedBound(WindowBound):
    """SmoothQuant at work on a model."""

    method: SmoothQuant

    def __init__(self, method: SmoothQuant, model: PreTrainedModel, processor: object = None) -> None:
        super().__init__(method, model, processor)
        self._factors: list[LayerFactors] = []
        self._peaks: tuple[tuple[float, float], ...] = ()
        self._calibration = "no statistics"
        if not method.needs_statistics:
            return
        found = load_statistics(model, None if method.statistics == "calibrated" else method.statistics)
        self._calibration = f"statistics {found.origin.sample_hash}"
        if method.smoothing == "folded":
            self._factors = [
                LayerFactors.calibrated(found, index, layer.self_attn, method.migration)
                for index, layer in enumerate(self.adapter.decoder_layers(model))
            ]
        if method.scales == "static":
            self._peaks = tuple(self._largest(found, index) for index in range(self.layers))

    def _largest(self, found: Statistics, layer: int) -> tuple[float, float]:
        k, v = (found.peak(name)[layer] for name in ("key", "value"))
        if self._factors:
            k, v = k / self._factors[layer].k, v / self._factors[layer].v
        return float(k.max()), float(v.max())

    def recipe(self) -> Recipe:
        return replace(super().recipe(), peaks=self._peaks)

    @cached_property
    def origin(self) -> CacheOrigin:
        """As `Bound.origin`, and the statistics: a stored cache is divided by their factors."""
        origin = super().origin
        return replace(origin, method=f"{origin.method} by {self._calibration}")

    def _install(self, undo: ExitStack) -> None:
        super()._install(undo)
        for layer, factors in zip(self.adapter.decoder_layers(self.model), self._factors, strict=False):
            attention = layer.self_attn
            shared = attention.o_proj.in_features // factors.k.numel()  # query heads a KV head
            q, out = (x.repeat_interleave(shared, 0) for x in (factors.k, factors.v))
            _scale_output(before_rope(attention, "q"), q, undo)
            _scale_output(before_rope(attention, "k"), 1 / factors.k, undo)
            _scale_output(attention.v_proj, 1 / factors.v, undo)
            _scale_input(attention.o_proj, out, undo)


def _scaler(module: nn.Module, factors: Tensor) -> Callable[[Tensor], Tensor]:
    """Multiplies [..., H * D] or [..., H, D] by factors [H, D], in the dtype of what it is given."""
    weight = next(module.parameters())
    factors = factors.to(weight.device, weight.dtype)

    def scale(x: Tensor) -> Tensor:
        return x * (factors if x.shape[-2:] == factors.shape else factors.flatten())

    return scale


def _scale_output(module: nn.Module, factors: Tensor, undo: ExitStack) -> None:
    scale = _scaler(module, factors)
    undo.callback(module.register_forward_hook(lambda m, args, out: scale(out)).remove)


def _scale_input(module: nn.Module, factors: Tensor, undo: ExitStack) -> None:
    scale = _scaler(module, factors)
    undo.callback(module.register_forward_pre_hook(lambda m, args: (scale(args[0]), *args[1:])).remove)
