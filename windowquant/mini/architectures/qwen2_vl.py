"""Qwen2-VL: two frames merged in time, 2x2 patches in space, and rotary positions of time, height and width."""

import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from windowquant.mini.architectures.architecture import BEFORE_VIDEO, Architecture, Layout
from windowquant.mini.render import SIDE
from windowquant.mini.text_model import PATCH, PER_FRAME, text_settings
from windowquant.mini.tokenizer import build_tokenizer, chat_template

START, END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
MERGE = 2
GRID = SIDE // PATCH
# rotary pairs that turn with time, height and width: the fast ones, whose heads look a fixed distance back, with time
SECTIONS = [6, 5, 5]


class Qwen2VL(Architecture):
    name = "qwen2_vl"
    frames = 96
    merged = 2
    after_video = END + "\n"

    def build_tokenizer(self) -> PreTrainedTokenizerFast:
        return build_tokenizer(IMAGE, VIDEO, separators=(START, END))

    def build_processor(self, tokenizer: PreTrainedTokenizerFast) -> Qwen2VLProcessor:
        pixels = SIDE * SIDE
        settings = {
            "size": {"shortest_edge": pixels, "longest_edge": pixels},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "patch_size": PATCH,
            "merge_size": MERGE,
            "temporal_patch_size": self.merged,
        }
        return Qwen2VLProcessor(
            image_processor=Qwen2VLImageProcessor(**settings),
            video_processor=Qwen2VLVideoProcessor(**settings, cap_pixels_per_frame=False),
            tokenizer=tokenizer,
            chat_template=chat_template(START + IMAGE + END, START + VIDEO + END),
        )

    def build_class(self) -> type[PreTrainedModel]:
        return Qwen2VLForConditionalGeneration

    def build_config(self, tokenizer: PreTrainedTokenizerFast) -> Qwen2VLConfig:
        text = text_settings(tokenizer)
        text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": SECTIONS}
        vision = {
            "depth": 4,
            "embed_dim": 128,
            "hidden_size": text["hidden_size"],
            "mlp_ratio": 3,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": self.merged,
        }
        names = {"image_token_id": IMAGE, "video_token_id": VIDEO}
        names |= {"vision_start_token_id": START, "vision_end_token_id": END}
        ids = {key: tokenizer.convert_tokens_to_ids(name) for key, name in names.items()}
        return Qwen2VLConfig(text_config=text, vision_config=vision, **ids, tie_word_embeddings=False)

    def vision(self, model: PreTrainedModel) -> dict[str, nn.Module]:
        return {"visual": model.model.visual}

    def frame_tokens(self, model: PreTrainedModel, pixels: Tensor) -> Tensor:
        frames = pixels.float() / 127.5 - 1
        patches, *grid = Qwen2VLVideoProcessor().patchify(frames, PATCH, MERGE, self.merged)
        grids = torch.tensor([grid]).expand(len(pixels), -1)
        return torch.stack(model.model.get_video_features(patches.flatten(0, 1), grids).pooler_output)

    def layout(self, tokenizer: PreTrainedTokenizerFast, groups: int) -> Layout:
        before, visual = tokenizer.encode(BEFORE_VIDEO + START), groups * PER_FRAME
        slot = tokenizer.convert_tokens_to_ids(VIDEO)
        return Layout([*before, *[slot] * visual], list(range(len(before), len(before) + visual)))

    def positions(self, counted: Tensor, part: Tensor, layout: Layout) -> Tensor:
        """M-RoPE positions [3, B, T]: the question is numbered on from the height and width of the video's grid, and
        `generate` numbers the reply on from the question's last token, whatever the highest position was."""
        start, groups = layout.visual[0], len(layout.visual) // PER_FRAME
        side = GRID // MERGE
        axes = [torch.arange(groups), torch.arange(side), torch.arange(side)]
        after = counted - len(layout.ids) + start + side
        out = torch.where(part > 0, after, counted).repeat(3, 1, 1)
        out[:, :, layout.visual] = start + torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)[:, None]
        return out
