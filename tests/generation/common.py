"""Models and calls that the tests of generation share."""

from functools import lru_cache
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from tests.architectures import build, video_inputs
from windowquant.models import cache_keyword

NAMES = ("llava_onevision", "qwen2_vl", "internvl")
EXACT = {"name": "fp16", "kv_dtype": "model"}
WINDOWQUANT = {"name": "windowquant", "window_size": 8, "sensitivity": (0.45, 0.6)}
WHAT, WHY = "what is this?", "and why is it that nobody ever goes there?"


@lru_cache
def loaded(name: str) -> tuple[PreTrainedModel, Any]:
    """Model and processor of an architecture, made once; no test changes them."""
    return build(name)


def asked(name: str, question: str = WHAT, seed: int = 0) -> dict[str, Any]:
    """One question about one video."""
    return video_inputs(name, loaded(name)[1], seed, question)


def generate(
    model: PreTrainedModel, inputs: dict[str, Any], cache: Cache | None = None, **options: Any
) -> GenerateDecoderOnlyOutput:
    """`generate`, with the logits it saw; greedy and of 8 tokens unless said otherwise."""
    own = {} if cache is None else {cache_keyword(model): cache}
    settings = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return model.generate(**inputs, **own, **{**settings, **options})


def same_steps(a: GenerateDecoderOnlyOutput, b: GenerateDecoderOnlyOutput) -> bool:
    """Whether two outputs have the same tokens and bit-identical logits at every step."""
    steps = zip(a.logits, b.logits, strict=True)
    return torch.equal(a.sequences, b.sequences) and all(torch.equal(x, y) for x, y in steps)


def close_steps(a: GenerateDecoderOnlyOutput, b: GenerateDecoderOnlyOutput, atol: float = 1e-4) -> bool:
    """Whether two outputs have the same tokens and logits that differ by rounding only."""
    steps = zip(a.logits, b.logits, strict=True)
    return torch.equal(a.sequences, b.sequences) and all(torch.allclose(x, y, atol=atol) for x, y in steps)
