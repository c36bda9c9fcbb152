"""A tiny vision-language model of the real transformers class, and data sets in the published schemas."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GitConfig,
    GitForCausalLM,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

SIDE = 16
PATCH = 4  # 16 patches a frame, pooled to 4 visual tokens


def byte_tokenizer(special: Sequence[str], **named: str) -> PreTrainedTokenizerFast:
    """One token a byte: no vocabulary to learn, any text in and out.

    Ids 0 and 1 are padding and end; then come the special tokens. named: those that a processor asks for by attribute.
    """
    tokens = ["<pad>", "<eos>", *special]
    vocabulary = {token: i for i, token in enumerate([*tokens, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=list(special),
        padding_side="left",
        **named,
    )


def chat_template(image: str, video: str) -> str:
    """Turns as "role: content" lines, with these placeholders for images and videos."""
    return (
        "{% for message in messages %}{{ message['role'] }}: {% for item in message['content'] %}"
        "{% if item['type'] == 'video' %}" + video + "{% elif item['type'] == 'image' %}" + image + "{% else %}"
        "{{ item['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


def tiny_processor() -> LlavaOnevisionProcessor:
    size, pinpoints = {"height": SIDE, "width": SIDE}, [[SIDE, SIDE]]
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(size=size, image_grid_pinpoints=pinpoints),
        video_processor=LlavaOnevisionVideoProcessor(size=size),
        tokenizer=byte_tokenizer(["<image>", "<video>"]),
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        chat_template=chat_template("<image>", "<video>"),
    )


def tiny_config(
    vocabulary: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, layers: int = 2, **text: Any
) -> LlavaOnevisionConfig:
    """Ids: 0 padding, 1 end, 2 image, 3 video."""
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    language = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        initializer_range=0.3,  # far from uniform answers, so that quantization shows
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        **text,
    )
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=language,
        image_token_id=2,
        video_token_id=3,
        image_grid_pinpoints=[[SIDE, SIDE]],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def save_tiny_llava(folder: Path) -> Path:
    """A saved LLaVA-OneVision with random weights (2 layers, 2 KV heads of 8 channels), and its processor."""
    processor = tiny_processor()
    torch.manual_seed(0)
    model = LlavaOnevisionForConditionalGeneration(tiny_config(len(processor.tokenizer)))
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def save_tiny_unknown(folder: Path, like: Path) -> Path:
    """A model that takes images, of an architecture without placeholder tokens for them (GIT), random weights."""
    shutil.copytree(like, folder)
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = GitConfig(
        vision_config={**vision, "image_size": SIDE, "patch_size": PATCH},
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    GitForCausalLM(config).save_pretrained(folder)
    return folder


def write_video(path: Path, frames: int = 8, side: int = SIDE, seed: int = 0) -> Path:
    """A small mp4 of `frames` coloured frames."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = np.random.default_rng(seed).integers(0, 255, (frames, 3))
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for colour in colours:
            image = np.broadcast_to(colour.astype(np.uint8), (side, side, 3))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")))
        container.mux(stream.encode())
    return path


def _save(root: Path, task: str, rows: list[dict]) -> None:
    DatasetDict({"test": Dataset.from_list(rows)}).save_to_disk(str(root / "datasets" / task))


def write_data(root: Path, questions: int = 4, videos: int = 2) -> Path:
    """NExT-QA and EgoSchema tables in their published columns, with videos where lmms-eval looks for them."""
    options = {f"a{i}": text for i, text in enumerate(("to eat", "to rest", "to play", "to run", "to sing"))}
    nextqa, egoschema = [], []
    for i in range(questions):
        video = 9_000_000_000 + i % videos
        shared = {"frame_count": 8, "width": SIDE, "height": SIDE, "question": f"why does the child do {i}"}
        nextqa.append({"video": video, **shared, "answer": i % 5, "qid": i, "type": "CW", **options})
        lettered = [f"{letter}. {text}" for letter, text in zip("ABCDE", options.values(), strict=True)]
        egoschema.append(
            {
                "question_idx": f"{i:05d}",
                "question": "What is c mainly doing?",
                "video_idx": f"clip-{i % videos}",
                "option": lettered,
                "answer": str(i % 5),
            }
        )
    _save(root, "nextqa", nextqa)
    _save(root, "egoschema", egoschema)
    for i in range(videos):
        write_video(root / "nextqa/NExTVideo" / f"{9_000_000_000 + i}.mp4", seed=i)
        write_video(root / "egoschema/videos" / f"clip-{i}.mp4", seed=10 + i)
    (root / "manifest.json").write_text(json.dumps({"fingerprint": "tinydata"}))
    return root
