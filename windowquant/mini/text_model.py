"""The stand-ins' language model: a small Qwen2, and a start from which it learns quickly."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from windowquant.mini.render import SIDE

PATCH = 16
PATCHES = (SIDE // PATCH) ** 2
PER_FRAME = PATCHES // 4  # every architecture merges 2x2 patches

# heads of the first layer that look a fixed distance back: at the word before, the word before that, the same cell of
# the frame before
OFFSETS = (1, 2, PER_FRAME)
FAST_PAIRS = 5
OFFSET_STRENGTH = 7.0
# heads that look for tokens like themselves must not stop at themselves
APART = 2.5
OUTLIERS = (25.0, -15.0)
# what the layers add starts small beside the token itself, so that deep layers still see which token it is
EMBEDDING_STD, RESIDUAL_GAIN = 0.3, 0.2


def text_settings(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Settings of the language model, the same for every architecture."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "initializer_range": 0.04,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


@torch.no_grad()
def initialise(model: PreTrainedModel, seed: int, offsets: Sequence[int] = OFFSETS) -> None:
    """A start from which the circuits that the tasks need form quickly.

    Query and key projections start equal within a group of heads, so that a token attends to tokens like itself; the
    first key head of layer 0 starts positional (query and key biases in the fast rotary pairs, phase-shifted by a
    distance). Two key channels of every head carry a huge constant bias in slow rotary pairs, as Qwen2's do: that is
    what breaks per-token and per-tensor key quantization on the real models.
    """
    generator = torch.Generator().manual_seed(seed)
    config, language_model = model.config.text_config, model.model.language_model
    head_dim = config.hidden_size // config.num_attention_heads
    half, group = head_dim // 2, config.num_attention_heads // config.num_key_value_heads
    frequency = 1e6 ** (-torch.arange(half) / half)
    language_model.embed_tokens.weight.normal_(0, EMBEDDING_STD, generator=generator)
    for index, layer in enumerate(language_model.layers):
        attention = layer.self_attn
        attention.o_proj.weight.mul_(RESIDUAL_GAIN)
        layer.mlp.down_proj.weight.mul_(RESIDUAL_GAIN)
        keys = attention.k_proj.weight.view(config.num_key_value_heads, head_dim, -1)
        queries = attention.q_proj.weight.view(config.num_key_value_heads, group, head_dim, -1)
        bias = attention.k_proj.bias.view(config.num_key_value_heads, head_dim)
        query_bias = attention.q_proj.bias.view(config.num_key_value_heads, group, head_dim)
        keys.mul_(2)
        queries.mul_(2)
        queries[1:].copy_(keys[1:, None].expand(-1, group, -1, -1))
        bias[1:, :FAST_PAIRS], query_bias[1:, :, :FAST_PAIRS] = APART, -APART
        if index == 0:
            keys[0] *= 0.05
            queries[0] *= 0.05
            bias[0, :FAST_PAIRS] = OFFSET_STRENGTH
            for head, offset in enumerate(offsets):
                turn = -offset * frequency[:FAST_PAIRS]
                query_bias[0, head, :FAST_PAIRS] = OFFSET_STRENGTH * torch.cos(turn)
                query_bias[0, head, half : half + FAST_PAIRS] = OFFSET_STRENGTH * torch.sin(turn)
        for head in range(config.num_key_value_heads):
            for shift, value in zip((0, half), OUTLIERS, strict=True):
                channel = int(torch.randint(half - 5, half, (1,), generator=generator))
                bias[head, shift + channel] = value
