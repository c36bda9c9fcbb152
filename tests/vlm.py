"""Tiny random LLaVA-OneVision models and hand-made inputs, so that tests need no processor and no file."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlavaOnevisionForConditionalGeneration

from tests.tiny import tiny_config

IMAGE, VIDEO, FIRST_WORD, VOCABULARY = 2, 3, 8, 64
PER_FRAME = 4  # 16 patches, pooled
NEWLINE = 1


def tiny_model(
    heads: int = 6, kv_heads: int = 2, head_dim: int = 8, layers: int = 2, seed: int = 0, **text: Any
) -> LlavaOnevisionForConditionalGeneration:
    """Random weights, far enough from uniform attention that quantization shows; float32, evaluation mode."""
    torch.manual_seed(seed)
    config = tiny_config(VOCABULARY, heads, kv_heads, head_dim, layers, **text)
    model = LlavaOnevisionForConditionalGeneration(config).eval()
    for layer in model.model.language_model.layers:  # biases are zero at first; real models' are not
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=1.0)
        torch.nn.init.normal_(layer.self_attn.v_proj.bias, std=0.3)
    model.generation_config.eos_token_id = None  # so that random answers have a length
    return model


def words(n: int, seed: int = 0) -> list[int]:
    """n token ids that are neither special nor placeholders."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_WORD, VOCABULARY, (n,), generator=generator).tolist()


def video_ids(frames: int = 8, before: int = 3, after: int = 7, seed: int = 0) -> list[int]:
    """Ids of one prompt: text, a video of `frames` frames and its newline, text."""
    return words(before, seed) + [VIDEO] * (frames * PER_FRAME + NEWLINE) + words(after, seed + 1)


def pixels(rows: int = 1, frames: int = 8, seed: int = 0) -> Tensor:
    """Random frames [rows, frames, 3, 16, 16]."""
    return torch.randn(rows, frames, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def video_inputs(frames: int = 8, before: int = 3, after: int = 7, seed: int = 0) -> dict[str, Tensor]:
    """What a processor returns for one prompt with one video."""
    ids = torch.tensor([video_ids(frames, before, after, seed)])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": pixels(1, frames, seed),
    }


def batch_inputs(rows: list[list[int]], frames: int, seed: int = 0) -> dict[str, Tensor]:
    """Left-padded prompts; the videos, of `frames` frames each, are counted from the placeholders."""
    length = max(map(len, rows))
    ids = torch.tensor([[0] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    videos = int((ids == VIDEO).sum()) // (frames * PER_FRAME + NEWLINE)
    return {"input_ids": ids, "attention_mask": mask, "pixel_values_videos": pixels(videos, frames, seed)}
