"""An architecture that no adapter knows, and those that nothing can be done for."""

import warnings
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    GitConfig,
    GitForCausalLM,
    LlamaConfig,
    MllamaConfig,
    MllamaForConditionalGeneration,
    VipLlavaConfig,
    VipLlavaForConditionalGeneration,
)

from tests import architectures as archs
from tests.architectures import PATCH, SIDE, TEXT
from windowquant.errors import UserError
from windowquant.method import get_method
from windowquant.models import adapter_for
from windowquant.models.generic import _say
from windowquant.protocols import answer


@pytest.fixture
def unknown() -> tuple[Any, dict[str, Any]]:
    """ViP-LLaVA, which is given what LLaVA's processor makes; and one prompt with a video's frames."""
    processor = archs.build("llava")[1]
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )
    config = VipLlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(vocab_size=len(processor.tokenizer), **TEXT),
        image_token_index=2,
        vision_feature_layer=[-2, -1],
    )
    model = VipLlavaForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    return model, archs.video_inputs("llava", processor)


def test_placeholder_ids_of_the_config_are_enough_and_it_says_so_once(unknown: tuple[Any, dict[str, Any]]) -> None:
    model, inputs = unknown
    _say.cache_clear()
    with pytest.warns(UserWarning, match="No adapter knows the model type 'vipllava'"):
        adapter = adapter_for(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        adapter_for(model)
    visual = adapter.prompt(model, inputs).visual
    assert torch.equal(visual, inputs["input_ids"] == 2) and int(visual.sum()) == 128


def test_it_runs_as_any_other(unknown: tuple[Any, dict[str, Any]]) -> None:
    model, inputs = unknown
    length = inputs["input_ids"].shape[1]
    want = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, length:].tolist()
    with get_method("fp16", kv_dtype="model").bind(model) as bound:
        for protocol in ("context", "cached", "paper"):
            assert answer(bound, inputs, protocol, 6)[0].tokens == want
        with pytest.raises(UserError, match="features of a 'vipllava' model cannot be given on their own"):
            bound.visual_features(inputs)
    with get_method("windowquant", window_size=8, sensitivity="online").bind(model) as bound:
        reply, session = answer(bound, inputs, "context", 6)
        assert session.cache.packed and min(reply.bits) < 16


def git() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return GitForCausalLM(GitConfig(vision_config={**vision, "image_size": 16}, num_attention_heads=4, **text))


def mllama() -> Any:
    """Images are attended in layers of their own, not in the prompt."""
    text = {**TEXT, "num_hidden_layers": 2, "cross_attention_layers": [1], "vocab_size": 300, "bos_token_id": 1}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 16, "patch_size": 4, "intermediate_layers_indices": [0]}
    vision |= {"vision_output_dim": 32, "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1}
    return MllamaForConditionalGeneration(MllamaConfig(text_config=text, vision_config=vision, image_token_index=3))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.nn.Linear(2, 2), "'Linear' model cannot be located, for it is no transformers model"),
        (git, "'git' model cannot be located, for its config names none of image_token_id"),
        (mllama, "'mllama' model cannot be located, for its decoder layers have no self_attn"),
    ],
    ids=["not a model", "git", "mllama"],
)
def test_what_cannot_be_located_is_refused_in_words(make: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as error:
        adapter_for(make())
    assert "supported model types: internvl, llava, llava_next, llava_onevision, qwen2_5_vl, qwen2_vl" in str(
        error.value
    )
