"""A text-only language model seen as one whose first tokens are the video."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models.adapter import Adapter, registered
from windowquant.models.prompt import Prompt, require_ids


class SpanAdapter(Adapter):
    """Takes the first `tokens` columns of every prompt for visual tokens; there are no pixels."""

    placeholder_keys: ClassVar[tuple[str, ...]] = ()
    pixel_keys: ClassVar[tuple[str, ...]] = ()
    text_config_key: str = ""  # how transformers names the model's own configuration
    exact_features: ClassVar[bool] = False

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def text_config(self, model: PreTrainedModel) -> Any:
        return model.config

    def language_model(self, model: PreTrainedModel) -> Any:
        return model.get_decoder()

    def prompt(self, model: PreTrainedModel, inputs: Mapping[str, Any]) -> Prompt:
        ids, attended = require_ids(inputs)
        return Prompt(ids, attended, attended & (torch.arange(ids.shape[1]) < self.tokens))

    def is_visual(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        return torch.zeros_like(ids, dtype=torch.bool)  # no id is a placeholder


@contextmanager
def span_of_text(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Within, methods bind to this text-only model, with the first `tokens` tokens of a prompt in place of the video.

    Raises UserError for a model that has an adapter of its own.
    """
    known, kind = registered(), model.config.model_type
    if kind in known:
        raise UserError(f"A {kind!r} model shows methods its own visual tokens; give a model of text alone.")
    known[kind] = SpanAdapter(tokens)
    try:
        yield
    finally:
        del known[kind]
