"""Builders of small random models of the real transformers classes, each with its real processor class."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaImageProcessor,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessor,
    LlavaNextProcessor,
    LlavaOnevisionForConditionalGeneration,
    LlavaProcessor,
    MistralConfig,
    PreTrainedModel,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tests.tiny import byte_tokenizer, chat_template, tiny_config, tiny_processor

SIDE = 16
PATCH = 4
FRAMES = 8  # of a video in the tests; one architecture limits the pixels of a whole video
LAYERS = 2
TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # far from uniform answers, so that quantization shows
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
QWEN_IMAGE, QWEN_VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"


def _qwen_tokenizer() -> Any:
    return byte_tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])


_QWEN_IDS = {"vision_start_token_id": 2, "vision_end_token_id": 3, "image_token_id": 4, "video_token_id": 5}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_PIXELS = {"shortest_edge": SIDE * SIDE, "longest_edge": 4 * SIDE * SIDE}


def _qwen_processor(kind: type[ProcessorMixin], video_kind: type) -> ProcessorMixin:
    grid = {"patch_size": PATCH, "temporal_patch_size": 2, "merge_size": 2}
    video_pixels = _PIXELS if video_kind is Qwen2VLVideoProcessor else {k: FRAMES * v for k, v in _PIXELS.items()}
    return kind(
        image_processor=Qwen2VLImageProcessor(size=_PIXELS, **grid),
        video_processor=video_kind(size=video_pixels, cap_pixels_per_frame=False, **grid),
        tokenizer=_qwen_tokenizer(),
        chat_template=chat_template(QWEN_IMAGE, QWEN_VIDEO),
    )


def qwen2_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    processor = _qwen_processor(Qwen2VLProcessor, Qwen2VLVideoProcessor)
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "patch_size": PATCH, "mlp_ratio": 2}
    text = {**TEXT, "vocab_size": len(processor.tokenizer), "rope_parameters": _MROPE}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(vision_config=vision, text_config=text, **_QWEN_IDS)
    ), processor


def qwen2_5_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    processor = _qwen_processor(Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 48,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "window_size": 2 * 2 * PATCH,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 4,
    }
    text = {**TEXT, "vocab_size": len(processor.tokenizer), "rope_parameters": _MROPE}
    config = Qwen2_5_VLConfig(vision_config=vision, text_config=text, **_QWEN_IDS)
    return Qwen2_5_VLForConditionalGeneration(config), processor


def qwen3_vl() -> tuple[PreTrainedModel, ProcessorMixin]:
    processor = _qwen_processor(Qwen3VLProcessor, Qwen3VLVideoProcessor)
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "out_hidden_size": 48,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,  # so that the deeper features count
    }
    rope = {**_MROPE, "mrope_interleaved": True}
    text = {**TEXT, "head_dim": 8, "vocab_size": len(processor.tokenizer), "rope_parameters": rope}
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(vision_config=vision, text_config=text, **_QWEN_IDS)
    ), processor


def internvl() -> tuple[PreTrainedModel, ProcessorMixin]:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = byte_tokenizer(list(names.values()), extra_special_tokens=names)
    size = {"height": SIDE, "width": SIDE}
    processor = InternVLProcessor(
        image_processor=GotOcr2ImageProcessor(size=size, crop_to_patches=True, max_patches=4),
        video_processor=InternVLVideoProcessor(size=size),
        tokenizer=tokenizer,
        image_seq_length=(SIDE // PATCH) ** 2 // 4,
        chat_template=chat_template("<IMG_CONTEXT>", "<video>"),
    )
    vision = InternVLVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=[SIDE, SIDE],
        patch_size=[PATCH, PATCH],
    )
    config = InternVLConfig(
        vision_config=vision,
        text_config=Qwen2Config(vocab_size=len(tokenizer), **TEXT),
        image_token_id=4,
        image_seq_length=processor.image_seq_length,
        tie_word_embeddings=False,
    )
    return InternVLForConditionalGeneration(config), processor


def _clip() -> CLIPVisionConfig:
    return CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
    )


def llava() -> tuple[PreTrainedModel, ProcessorMixin]:
    size = {"height": SIDE, "width": SIDE}
    processor = LlavaProcessor(
        image_processor=LlavaImageProcessor(size={"shortest_edge": SIDE}, crop_size=size),
        tokenizer=byte_tokenizer(["<image>"]),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>", "<video>"),
    )
    text = LlamaConfig(vocab_size=len(processor.tokenizer), **TEXT)
    config = LlavaConfig(vision_config=_clip(), text_config=text, image_token_id=2, image_seq_length=16)
    return LlavaForConditionalGeneration(config), processor


def llava_next() -> tuple[PreTrainedModel, ProcessorMixin]:
    size, grids = {"height": SIDE, "width": SIDE}, [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessor(
            size={"shortest_edge": SIDE}, crop_size=size, image_grid_pinpoints=grids
        ),
        tokenizer=byte_tokenizer(["<image>"]),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>", "<video>"),
    )
    text = MistralConfig(vocab_size=len(processor.tokenizer), sliding_window=None, **TEXT)
    config = LlavaNextConfig(
        vision_config=_clip(), text_config=text, image_token_id=2, image_grid_pinpoints=grids, image_seq_length=16
    )
    return LlavaNextForConditionalGeneration(config), processor


def llava_onevision() -> tuple[PreTrainedModel, ProcessorMixin]:
    processor = tiny_processor()
    return LlavaOnevisionForConditionalGeneration(tiny_config(len(processor.tokenizer))), processor


ARCHITECTURES: dict[str, Callable[[], tuple[PreTrainedModel, ProcessorMixin]]] = {
    builder.__name__: builder
    for builder in (llava_onevision, qwen2_vl, qwen2_5_vl, qwen3_vl, internvl, llava, llava_next)
}
PLACEHOLDERS = {
    "llava_onevision": ("<image>", "<video>"),
    "qwen2_vl": (QWEN_IMAGE, QWEN_VIDEO),
    "qwen2_5_vl": (QWEN_IMAGE, QWEN_VIDEO),
    "qwen3_vl": (QWEN_IMAGE, QWEN_VIDEO),
    "internvl": ("<IMG_CONTEXT>", "<video>"),
    "llava": ("<image>", None),
    "llava_next": ("<image>", None),
}
"""What a prompt's text holds for an image and a video; None where the class takes no videos."""


def build(name: str, seed: int = 0) -> tuple[PreTrainedModel, Any]:
    """Model (float32, evaluation mode, random weights from the seed) and processor of an architecture."""
    torch.manual_seed(seed)
    model, processor = ARCHITECTURES[name]()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("_proj.bias"):  # zero at first; real models' are not
            torch.nn.init.normal_(parameter, std=0.3)
    model.generation_config.eos_token_id = None  # so that random answers have a length
    return model.eval(), processor
