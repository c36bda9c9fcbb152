"""InternVL: InternViT, pixel shuffle, a projector, and a text in front of every frame."""

from torch import Tensor, nn
from transformers import (
    GotOcr2ImageProcessor,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVideoProcessor,
    InternVLVisionConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from windowquant.mini.architectures.architecture import BEFORE_VIDEO, Architecture, Layout
from windowquant.mini.render import SIDE
from windowquant.mini.text_model import PATCH, PER_FRAME, text_settings
from windowquant.mini.tokenizer import build_tokenizer, chat_template

START, END, IMAGE, VIDEO = "<img>", "</img>", "<IMG_CONTEXT>", "<video>"


class InternVL(Architecture):
    name = "internvl"
    frames = 48
    after_video = END + "\n"

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        numbers = [f"Frame{k}: " for k in range(1, self.frames + 1)]
        named = {"start_image_token": START, "end_image_token": END, "context_image_token": IMAGE, "video_token": VIDEO}
        return build_tokenizer(IMAGE, VIDEO, separators=(START, END), pieces=numbers, named=named)

    def build_processor(self, tokenizer: PreTrainedTokenizerFast) -> InternVLProcessor:
        settings = {"size": {"height": SIDE, "width": SIDE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        return InternVLProcessor(
            image_processor=GotOcr2ImageProcessor(**settings),
            video_processor=InternVLVideoProcessor(**settings),
            tokenizer=tokenizer,
            image_seq_length=PER_FRAME,
            chat_template=chat_template(IMAGE, VIDEO),
        )

    def build_class(self) -> type[PreTrainedModel]:
        return InternVLForConditionalGeneration

    def build_config(self, tokenizer: PreTrainedTokenizerFast) -> InternVLConfig:
        vision = InternVLVisionConfig(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            attention_bias=True,
            image_size=[SIDE, SIDE],
            patch_size=[PATCH, PATCH],
            layer_scale_init_value=1.0,
        )
        return InternVLConfig(
            vision_config=vision,
            text_config=Qwen2Config(**text_settings(tokenizer), tie_word_embeddings=False),
            image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
            image_seq_length=PER_FRAME,
            tie_word_embeddings=False,
        )

    def vision(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        return {"tower": model.model.vision_tower, "projector": model.model.multi_modal_projector}

    def frame_tokens(self, model: PreTrainedModel, pixels: Tensor) -> Tensor:
        return model.model.get_image_features(pixels[:, 0].float() / 127.5 - 1).pooler_output

    def layout(self, tokenizer: PreTrainedTokenizerFast, groups: int) -> Layout:
        ids: list[int] = tokenizer.encode(BEFORE_VIDEO)
        visual: list[int] = []
        slot = tokenizer.convert_tokens_to_ids(IMAGE)
        for k in range(groups):
            ids += tokenizer.encode(f"{self.after_video if k else ''}Frame{k + 1}: {START}")
            visual += range(len(ids), len(ids) + PER_FRAME)
            ids += [slot] * PER_FRAME
        return Layout(ids, visual)
