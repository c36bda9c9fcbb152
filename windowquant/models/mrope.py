"""Qwen's multimodal rotary positions: three counters (time, height, width) for each token."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models.adapter import Adapter
from windowquant.models.pictures import Run

_TYPES = {"image_token_id": 1, "video_token_id": 2}


class MRope(Adapter):
    """An architecture whose model computes three positions a token from the grids of images and videos.

    The model keeps the offset of its latest request for the tokens that follow; the prompt's own positions are
    independent of that, and so of other requests in between.
    """

    grid_keys: ClassVar[tuple[str, ...]] = ("image_grid_thw", "video_grid_thw")

    def positions(
        self, model: PreTrainedModel, inputs: Mapping[str, Any], ids: Tensor, attended: Tensor
    ) -> Tensor | None:
        known = (*self.grid_keys, "second_per_grid_ts")
        grids = {key: torch.as_tensor(inputs[key]).cpu() for key in known if inputs.get(key) is not None}
        types = torch.zeros_like(ids)
        for key, token in self.placeholders(model).items():
            types[(ids == token) & attended] = _TYPES[key]
        for kind, key in enumerate(self.grid_keys, start=1):
            if (types == kind).any() and key not in grids:
                raise UserError(f"The inputs hold visual tokens but no {key}; pass all that the processor returned.")
        if not grids:
            counted = (attended.long().cumsum(-1) - 1).clamp(min=0)
            return counted.expand(3, -1, -1)
        rope = model.model.get_rope_index
        positions, _ = rope(ids, mm_token_type_ids=types, attention_mask=attended.long(), **grids)
        return positions

    def grid(self, inputs: Mapping[str, Any], run: Run) -> tuple[int, int, int]:
        """(time, height, width) of a run's grid, before spatial merging."""
        t, h, w = torch.as_tensor(inputs[f"{run.kind}_grid_thw"])[run.index].tolist()
        return t, h, w

    def frames_in(self, model: PreTrainedModel, inputs: Mapping[str, Any], run: Run) -> list[int]:
        t, _, _ = self.grid(inputs, run)
        return [run.length // t] * t
