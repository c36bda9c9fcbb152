"""Builds the untrained stand-in: byte-level tokenizer, processor, chat template, and a small model of the real
transformers class."""

import re
from collections.abc import Iterator

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

from windowquant.mini import scenes as sc
from windowquant.mini.render import SIDE

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>")
# an option's marker and an answer's letter are one token each; everything else splits into words, single digits and
# signs
PIECES = r"\n[A-E]\.| \([A-E]\)| ?[A-Za-z]+| ?[0-9]| ?[^\sA-Za-z0-9]+|\s"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for item in message['content'] %}{% if item['type'] == 'image' %}{{ '<image>\n' }}"
    "{% elif item['type'] == 'video' %}{{ '<video>\n' }}{% endif %}{% endfor %}"
    "{% for item in message['content'] %}{% if item['type'] == 'text' %}{{ item['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PATCH = 16
PATCHES = (SIDE // PATCH) ** 2
PER_FRAME = PATCHES // 4  # the class pools a video's frames 2x2


def _words() -> Iterator[str]:
    """The pieces of all that the model reads or says, each as often as the others, so that each becomes one token."""
    rng, texts = np.random.default_rng(0), ["system", "user", "assistant", "You are a helpful assistant.", "yes no"]
    for _ in range(200):
        story, main = sc.sample_story(rng), sc.sample_story(rng, main=str(rng.choice(sc.CONTENTS)))
        asked = [sc.ask(mix, story, rng) for mix in (sc.NEXTQA_MIX, sc.INTENTQA_MIX) for _ in range(4)]
        asked += [sc.ask_main(main, rng), sc.describe(story)]
        texts += [f"\n{sc.prompt(question, 'egoschema')} {question.reply}" for question in asked]
    texts += [f" {word}" for word in (*sc.PLACES, *sc.CONTENTS)]
    for piece in sorted({piece for text in texts for piece in re.findall(PIECES, text)}):
        yield from [piece] * 50


def build_tokenizer(vocabulary: int = 1024) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the mini world's words; any other text falls back to bytes."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_words(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1], *SPECIAL[3:]],
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionProcessor:
    size, mean, std = {"height": SIDE, "width": SIDE}, [0.5] * 3, [0.5] * 3
    pinpoints = [[SIDE * a, SIDE * b] for a in (1, 2) for b in (1, 2)]
    return LlavaOnevisionProcessor(
        image_processor=LlavaOnevisionImageProcessor(
            size=size, image_mean=mean, image_std=std, image_grid_pinpoints=pinpoints
        ),
        video_processor=LlavaOnevisionVideoProcessor(size=size, image_mean=mean, image_std=std),
        tokenizer=tokenizer,
        num_image_tokens=PATCHES,
        vision_feature_select_strategy="full",
        chat_template=CHAT_TEMPLATE,
    )


def _config(tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionConfig:
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.04,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaOnevisionConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=[[SIDE * a, SIDE * b] for a in (1, 2) for b in (1, 2)],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )


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


@torch.no_grad()
def initialise(model: LlavaOnevisionForConditionalGeneration, seed: int) -> None:
    """A start from which the circuits that the tasks need form quickly.

    Query and key projections start equal within a group of heads, so that a token attends to tokens like itself; the
    first key head of layer 0 starts positional (query and key biases in the fast rotary pairs, phase-shifted by a
    distance). Two key channels of every head carry a huge constant bias in slow rotary pairs, as Qwen2's do: that is
    what breaks per-token and per-tensor key quantization on the real models.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config.text_config
    head_dim = config.hidden_size // config.num_attention_heads
    half, group = head_dim // 2, config.num_attention_heads // config.num_key_value_heads
    frequency = 1e6 ** (-torch.arange(half) / half)
    model.model.language_model.embed_tokens.weight.normal_(0, EMBEDDING_STD, generator=generator)
    for index, layer in enumerate(model.model.language_model.layers):
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
            for head, offset in enumerate(OFFSETS):
                turn = -offset * frequency[:FAST_PAIRS]
                query_bias[0, head, :FAST_PAIRS] = OFFSET_STRENGTH * torch.cos(turn)
                query_bias[0, head, half : half + FAST_PAIRS] = OFFSET_STRENGTH * torch.sin(turn)
        for head in range(config.num_key_value_heads):
            for shift, value in zip((0, half), OUTLIERS, strict=True):
                channel = int(torch.randint(half - 5, half, (1,), generator=generator))
                bias[head, shift + channel] = value


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlavaOnevisionForConditionalGeneration:
    """float32, on the CPU, initialised from the seed."""
    torch.manual_seed(seed)
    model = LlavaOnevisionForConditionalGeneration(_config(tokenizer))
    initialise(model, seed)
    return model
