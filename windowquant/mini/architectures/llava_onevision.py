"""LLaVA-OneVision: SigLIP, a projector, 2x2 pooling of a video's frames, and a newline after the last one."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessor,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    SiglipVisionConfig,
)

from windowquant.mini.architectures.architecture import BEFORE_VIDEO, Architecture, Layout
from windowquant.mini.render import SIDE
from windowquant.mini.text_model import PATCH, PATCHES, PER_FRAME, text_settings
from windowquant.mini.tokenizer import build_tokenizer, chat_template

PINPOINTS = [[SIDE * a, SIDE * b] for a in (1, 2) for b in (1, 2)]


class LlavaOnevision(Architecture):
    name = "llava_onevision"
    frames = 96

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer()

    def build_processor(self, tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionProcessor:
        size, mean, std = {"height": SIDE, "width": SIDE}, [0.5] * 3, [0.5] * 3
        return LlavaOnevisionProcessor(
            image_processor=LlavaOnevisionImageProcessor(
                size=size, image_mean=mean, image_std=std, image_grid_pinpoints=PINPOINTS
            ),
            video_processor=LlavaOnevisionVideoProcessor(size=size, image_mean=mean, image_std=std),
            tokenizer=tokenizer,
            num_image_tokens=PATCHES,
            vision_feature_select_strategy="full",
            chat_template=chat_template("<image>", "<video>"),
        )

    def build_class(self) -> type[PreTrainedModel]:
        return LlavaOnevisionForConditionalGeneration

    def build_config(self, tokenizer: PreTrainedTokenizerFast) -> LlavaOnevisionConfig:
        vision = SiglipVisionConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
            vision_use_head=False,
        )
        return LlavaOnevisionConfig(
            vision_config=vision,
            text_config=Qwen2Config(**text_settings(tokenizer), tie_word_embeddings=False),
            image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
            video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
            image_grid_pinpoints=PINPOINTS,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=False,
        )

    def vision(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        return {"tower": model.model.vision_tower, "projector": model.model.multi_modal_projector}

    def frame_tokens(self, model: PreTrainedModel, pixels: Tensor) -> Tensor:
        """As the class, except that the tower's last layer norm comes in between: see `settle`."""
        features = model.model.vision_tower(pixel_values=pixels[:, 0].float() / 127.5 - 1).last_hidden_state
        z = model.model.multi_modal_projector(features)
        side = int(z.shape[1] ** 0.5)
        z = F.interpolate(z.unflatten(1, (side, side)).permute(0, 3, 1, 2), size=[side // 2] * 2, mode="bilinear")
        return z.permute(0, 2, 3, 1).flatten(1, 2)

    @torch.no_grad()
    def settle(self, model: PreTrainedModel, pixels: Tensor) -> None:
        """Moves the tower's last layer norm into the projector.

        The training has the projector behind that norm, the class takes the tower's output before it. The two are made
        to agree: gain and bias of the norm, the subtraction of the mean, and the mean scale go into the projector's
        first layer, and the norm is left with nothing but the deviation of single tokens from the mean scale.
        """
        tower, first = model.model.vision_tower, model.model.multi_modal_projector.linear_1
        norm = tower.post_layernorm
        out = tower(pixel_values=pixels[:, 0].float() / 127.5 - 1, output_hidden_states=True)
        scale = (out.hidden_states[-1].var(-1, unbiased=False) + norm.eps).rsqrt().mean()
        first.bias += first.weight @ norm.bias
        weight = first.weight * norm.weight * scale
        first.weight.copy_(weight - weight.mean(1, keepdim=True))
        norm.weight.fill_(1 / scale)
        norm.bias.zero_()

    def layout(self, tokenizer: PreTrainedTokenizerFast, groups: int) -> Layout:
        before, visual = tokenizer.encode(BEFORE_VIDEO), groups * PER_FRAME
        slot = tokenizer.convert_tokens_to_ids("<video>")
        return Layout([*before, *[slot] * (visual + 1)], list(range(len(before), len(before) + visual)))

    def embed(self, model: PreTrainedModel, words: Tensor, visual: Tensor, layout: Layout) -> Tensor:
        first, after = layout.visual[0], len(layout.ids)
        newline = model.model.image_newline.expand(len(words), 1, -1)
        return torch.cat([words[:, :first], visual, newline, words[:, after:]], 1)

    def emitted(self, model: PreTrainedModel) -> Mapping[str, nn.Parameter]:
        return {"newline": model.model.image_newline}
