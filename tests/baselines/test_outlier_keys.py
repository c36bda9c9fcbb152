"""Per-token codes lose keys that have a huge constant channel, as Qwen2's do; per-channel codes do not.

Shown on the stand-in's trained weights. Its key biases of 25 and -15 (norm 29 a head) are Qwen2's in kind, but Qwen2's
first and last layers reach norms of 605 and 921: the second model below is the first with its two outlier channel pairs
twenty times as large in K and as small in Q, which changes nothing that it computes.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from windowquant.harness.loading import CHECKPOINTS
from windowquant.method import get_method
from windowquant.mini import scenes as sc
from windowquant.mini.render import Drawings, frames
from windowquant.protocols import Session, answer

FOLDER = CHECKPOINTS / "llava_onevision"
MAGNIFIED = 20.0


def magnified(model: torch.nn.Module) -> torch.nn.Module:
    """A copy whose two widest key channels a head, with their RoPE partners, are larger; queries make up for it."""
    model = copy.deepcopy(model)
    for layer in model.model.language_model.layers:
        attention = layer.self_attn
        k = attention.k_proj.bias.data.view(-1, attention.head_dim)
        half, group = attention.head_dim // 2, attention.q_proj.out_features // attention.k_proj.out_features
        factors = torch.ones_like(k)
        for row, widest in zip(factors, k.abs().topk(2).indices, strict=True):
            row[torch.cat([widest % half, widest % half + half])] = MAGNIFIED
        shared = factors.repeat_interleave(group, 0)
        for projection, scale in ((attention.k_proj, factors), (attention.q_proj, 1 / shared)):
            projection.weight.data *= scale.flatten()[:, None]
            projection.bias.data *= scale.flatten()
    return model


@pytest.fixture(scope="module")
def asked() -> dict[str, torch.Tensor]:
    """A question about a video that no training saw."""
    processor = AutoProcessor.from_pretrained(FOLDER)
    rng = np.random.default_rng(5)
    story = sc.sample_story(rng)
    text = sc.prompt(sc.ask(sc.NEXTQA_MIX, story, rng), "nextqa")
    turn = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": text}]}]
    prompt = processor.apply_chat_template(turn, add_generation_prompt=True)
    return dict(processor(text=[prompt], videos=[frames(story, Drawings(False), 5)], return_tensors="pt"))


@pytest.fixture(scope="module", params=["as trained", "as large as Qwen2's"])
def case(request, asked):
    """Name and model, with FP16's answer and its log-probabilities."""
    model = AutoModelForImageTextToText.from_pretrained(Path(FOLDER)).eval()
    model = magnified(model) if request.param != "as trained" else model
    with get_method("fp16", kv_dtype="model").bind(model) as bound:
        reply, session = answer(bound, asked, "context", 12)
        return request.param, model, reply.tokens, session.logits(reply.tokens).log_softmax(-1)


def divergence(case, asked, bits: int, granularity: str) -> tuple[float, float]:
    """KL from FP16 along its answer, and the share of its tokens that are still the first choice."""
    _, model, tokens, exact = case
    method = get_method("rtn", bits_per_code=bits, granularity=granularity, kv_dtype="model")
    with method.bind(model) as bound:
        other = Session(bound, asked, "context").logits(tokens).log_softmax(-1)
    kl = (exact.exp() * (exact - other)).sum(-1).mean()
    return float(kl), float((other.argmax(-1) == exact.argmax(-1)).float().mean())


def test_int4_per_token_collapses_at_qwen2s_size_and_per_channel_does_not(case, asked) -> None:
    channel, token = (divergence(case, asked, 4, granularity) for granularity in ("channel", "token"))
    assert channel[0] < 1e-3 and channel[1] == 1
    if case[0] == "as trained":
        assert token[0] < 1e-3  # 4 bits still resolve the other channels beside a bias of 25
    else:
        assert token[0] > 0.5 and token[1] < 1


def test_int2_per_token_collapses_at_either_size(case, asked) -> None:
    channel, token = (divergence(case, asked, 2, granularity) for granularity in ("channel", "token"))
    assert token[0] > 0.5 and token[0] > 20 * channel[0]


def test_magnified_channels_change_nothing_and_are_of_qwen2s_size(asked) -> None:
    model = AutoModelForImageTextToText.from_pretrained(Path(FOLDER)).eval()
    larger = magnified(model)
    torch.testing.assert_close(larger(**asked).logits, model(**asked).logits, atol=2e-3, rtol=1e-3)
    norms = [float(layer.self_attn.k_proj.bias.detach().norm()) for layer in larger.model.language_model.layers]
    assert min(norms) > 600 and max(norms) < 922
