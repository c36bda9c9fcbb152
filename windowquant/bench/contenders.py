"""What attends over one layer's cache in one decode step: our kernels, and what one would use instead."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from windowquant.attention import windowquant_attention
from windowquant.bench import unfused
from windowquant.bench.shapes import TextShape, mixed_bits
from windowquant.bench.synthetic import AFTER, BEFORE, packed_layer, random_kv
from windowquant.bench.timing import Step
from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.view import Attend
from windowquant.core.packed import PackedLayer
from windowquant.kernels import get_backend
from windowquant.method import get_method
from windowquant.stock_method import StockMethod

STOCK = ("hf_quanto", "hf_hqq", "hf_fp8")
"""Back ends of transformers' QuantizedCache that are measured, by the names of their methods."""


class Attention(nn.Module):
    """What the attention functions of transformers read of the module that calls them."""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = group, True


@dataclass(frozen=True)
class Contender:
    """One way to attend: a step of one query token a request, and the bytes of K and V that it has to read.

    kind: "kernel" attends only, "step" takes a token into the cache and attends. mix: of ours, which bit-widths.
    """

    name: str
    kind: str
    dtype: str
    mix: str | None
    step: Step
    needed_bytes: int


@dataclass(frozen=True)
class Cell:
    """What all contenders of one measurement share: sizes, tokens, and where it runs.

    visual: a whole number of windows. dtype: of the queries that ours get, and of the K and V handed to it.
    """

    shape: TextShape
    visual: int
    window: int
    batch: int
    dtype: torch.dtype
    device: torch.device
    backend: str | None = None

    @property
    def tokens(self) -> int:
        """T, with the text around the video."""
        return BEFORE + self.visual + AFTER

    @property
    def scaling(self) -> float:
        """Of q . k."""
        return float(self.shape.channels**-0.5)

    def query(self, dtype: torch.dtype) -> Tensor:
        """[B, Hq, 1, D]."""
        shape = (self.batch, self.shape.heads, 1, self.shape.channels)
        return torch.randn(shape, dtype=dtype, device=self.device)

    def kv(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """[B, H, tokens, D]."""
        return random_kv(self.batch, self.shape, tokens, dtype, self.device)


def ours(cell: Cell, mix: str) -> Iterator[Contender]:
    """Our default kernel for the device, or the cell's, over the packed layer of a mix; and the unfused path."""
    attend = get_backend(cell.backend, cell.device)
    layer = _packed(cell, mix, attend)
    yield _kernel(cell, layer, mix, f"windowquant {mix}", attend)
    if mix == "paper":
        yield _kernel(cell, layer, mix, "unfused", unfused.attend)


def _packed(cell: Cell, mix: str, attend: Attend) -> PackedCacheLayer:
    bits = mixed_bits(cell.visual // cell.window, mix)
    k, v = (cell.kv(cell.tokens, cell.dtype) for _ in range(2))
    return packed_layer(bits, cell.window, k, v, attend)


def _kernel(cell: Cell, layer: PackedCacheLayer, mix: str, name: str, attend: Attend) -> Contender:
    stored, q, scaling = layer.stored, cell.query(cell.dtype), cell.scaling
    assert stored is not None
    length = sum(len(segment.windows) * cell.window for segment in stored.segments) + stored.kept.length
    order = torch.zeros(1, 1, dtype=torch.int64, device=cell.device).expand(cell.batch, length)
    packed = PackedLayer(stored.kept.k, stored.kept.v, stored.segments, order)
    held = stored.nbytes()
    needed = held.total - held.slack
    return Contender(name, "kernel", _name(cell.dtype), mix, lambda: attend(q, packed, None, scaling), needed)


def ours_step(cell: Cell, mix: str) -> Contender:
    """A token into the packed cache and attention as transformers calls it: what `DynamicCache`'s step is to it."""
    layer = _packed(cell, mix, get_backend(cell.backend, cell.device))
    assert layer.stored is not None
    held = layer.stored.nbytes()
    step = _update_and_attend(cell, layer.update, cell.dtype, windowquant_attention)
    return Contender(f"windowquant {mix}, step", "step", _name(cell.dtype), mix, step, held.total - held.slack)


def sdpa(cell: Cell, dtype: torch.dtype) -> Iterator[Contender]:
    """SDPA over unquantized K and V as transformers calls it, and with the query group as rows of each KV head."""
    k, v, q = cell.kv(cell.tokens, dtype), cell.kv(cell.tokens, dtype), cell.query(dtype)
    module, scaling, needed = Attention(cell.shape.group), cell.scaling, 2 * k.numel() * k.element_size()

    def stock() -> None:
        sdpa_attention_forward(module, q, k, v, None, scaling=scaling)

    def rows() -> None:
        grouped = q.view(cell.batch, cell.shape.kv_heads, cell.shape.group, cell.shape.channels)
        scaled_dot_product_attention(grouped, k, v, scale=scaling)

    yield Contender("SDPA as transformers calls it", "kernel", _name(dtype), None, stock, needed)
    if cell.shape.group > 1:
        yield Contender("SDPA, query group as rows", "kernel", _name(dtype), None, rows, needed)


def flash_and_flex(cell: Cell, dtype: torch.dtype) -> Iterator[Contender]:
    """SDPA held to flash attention, and compiled FlexAttention, over unquantized K and V; for a CUDA device."""
    k, v, q = cell.kv(cell.tokens, dtype), cell.kv(cell.tokens, dtype), cell.query(dtype)
    needed, grouped, scaling = 2 * k.numel() * k.element_size(), cell.shape.group > 1, cell.scaling
    compiled = torch.compile(flex_attention) if cell.device.type == "cuda" else flex_attention

    def flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=grouped)

    def flex() -> None:
        compiled(q, k, v, scale=scaling, enable_gqa=grouped)

    yield Contender("flash attention", "kernel", _name(dtype), None, flash, needed)
    yield Contender("FlexAttention", "kernel", _name(dtype), None, flex, needed)


def dynamic(cell: Cell, dtype: torch.dtype) -> Contender:
    """`DynamicCache`'s step: the new token concatenated to K and V, then SDPA as transformers calls it."""
    cache = DynamicCache()
    cache.update(cell.kv(cell.tokens, dtype), cell.kv(cell.tokens, dtype), 0)
    needed = 2 * cache.layers[0].keys.numel() * dtype.itemsize
    step = _update_and_attend(cell, cache.layers[0].update, dtype, sdpa_attention_forward)
    return Contender("DynamicCache, step", "step", _name(dtype), None, step, needed)


def stock_quantized(cell: Cell, name: str, undo: ExitStack) -> Contender:
    """A step of transformers' `QuantizedCache` with one of its back ends and its own defaults: the whole layer is
    dequantized, then SDPA. Its bytes are the codes and scales that it holds."""
    method = get_method(name)
    assert isinstance(method, StockMethod)
    model: Any = nn.Module()  # no back end looks at it
    method.prepare(model, undo)
    cache: Any = method.make_cache(cell.shape.config())
    cache.update(cell.kv(cell.tokens, cell.dtype), cell.kv(cell.tokens, cell.dtype), 0)
    update: Callable[..., Any] = cache.layers[0].update
    step = _update_and_attend(cell, update, cell.dtype, sdpa_attention_forward)
    return Contender(f"QuantizedCache {name}, step", "step", _name(cell.dtype), None, step, cache.nbytes().total)


def _update_and_attend(cell: Cell, update: Callable[..., Any], dtype: torch.dtype, attention: Any) -> Step:
    q, k, v = cell.query(dtype), cell.kv(1, dtype), cell.kv(1, dtype)
    module, scaling = Attention(cell.shape.group), cell.scaling

    def step() -> None:
        key, value = update(k, v)
        attention(module, q, key, value, None, scaling=scaling)

    return step


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
