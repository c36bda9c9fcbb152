"""Prompts, K and V, and models of random numbers: latency does not depend on what the numbers are.

Only the scores of the windows do, and with them the plan: those of random embeddings are nearly normally distributed.
"""

import copy
import json
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn
from transformers import Cache, LlavaOnevisionConfig, LlavaOnevisionForConditionalGeneration, SiglipVisionConfig

from windowquant.bench.shapes import TextShape
from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.packed_cache import PackedCache
from windowquant.cache.recipe import Recipe
from windowquant.cache.request import CacheRequest
from windowquant.cache.request_cache import RequestCache
from windowquant.cache.view import Attend
from windowquant.models.prompt import Prompt

BEFORE, AFTER = 8, 24
"""Text tokens of a prompt before and after its video."""

VIDEO_ID, TEXT_ID = 3, 5


def ids_of(batch: int, visual: int) -> Tensor:
    """Token ids int64 [B, T] of requests with `visual` visual tokens each and a little text around them."""
    ids = torch.full((batch, BEFORE + visual + AFTER), TEXT_ID)
    ids[:, BEFORE : BEFORE + visual] = VIDEO_ID
    return ids


def random_kv(batch: int, shape: TextShape, tokens: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal [B, H, T, D]."""
    return torch.randn(batch, shape.kv_heads, tokens, shape.channels, dtype=dtype, device=device)


def packed_layer(bits: tuple[int, ...], size: int, k: Tensor, v: Tensor, attend: Attend) -> PackedCacheLayer:
    """A layer of the packed cache that holds k, v [B, H, T, D], its first windows of `size` in `bits`."""
    visual = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool)
    visual[:, BEFORE : BEFORE + size * len(bits)] = True
    prompt = Prompt(torch.zeros_like(visual, dtype=torch.int64), torch.ones_like(visual), visual)
    layer = PackedCacheLayer(0, CacheRequest(prompt, Recipe(size), lambda _: bits, attend, lambda: None))
    layer.update(k, v)
    layer.pack_if_ready()
    return layer


@torch.no_grad()
def random_model(shape: TextShape, dtype: torch.dtype, device: torch.device) -> LlavaOnevisionForConditionalGeneration:
    """A LLaVA-OneVision whose language model has this shape and random weights; its vision tower is a token one."""
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=8, patch_size=4,
        vision_use_head=False,
    )  # fmt: skip
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=shape.config(),
        image_token_id=2,
        video_token_id=VIDEO_ID,
        image_grid_pinpoints=[[8, 8]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=shape.tied,
    )
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return LlavaOnevisionForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(default)


def sharing(model: nn.Module) -> nn.Module:
    """A second model of the same parameters, so that two methods can be bound side by side; takes no memory."""
    return copy.deepcopy(model, {id(x): x for x in model.parameters()})


def filled(cache: Cache, batch: int, shape: TextShape, visual: int, dtype: torch.dtype, device: torch.device) -> Cache:
    """The cache after a prefill, with random K and V given straight to its layers instead.

    A packed cache is shown random embeddings first, from which it scores windows and plans as it always does; they are
    the same ones every time.
    """
    torch.manual_seed(0)
    tokens = BEFORE + visual + AFTER
    if isinstance(cache, RequestCache):
        cache.observe(torch.randn(batch, tokens, shape.hidden, dtype=dtype, device=device))
    k, v = (random_kv(batch, shape, tokens, dtype, device) for _ in range(2))
    for layer in range(shape.layers):
        cache.update(k, v, layer)
        if isinstance(cache, PackedCache):
            cache.layers[layer].pack_if_ready()
    return cache


def stand_in_sensitivity(layers: int) -> tuple[float, ...]:
    """s_l of the embedded LLaVA-OneVision stand-in, stretched over `layers` layers by linear interpolation.

    A random model has none of its own that would mean anything, and the plan's bits depend on them.
    """
    path = files("windowquant.mini").joinpath("checkpoints/llava_onevision/windowquant_calibration.json")
    values = json.loads(path.read_text(encoding="utf-8"))["values"]
    places = np.linspace(0, len(values) - 1, layers)
    return tuple(float(x) for x in np.interp(places, range(len(values)), values))
