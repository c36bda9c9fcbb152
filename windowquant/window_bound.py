"""A window method at work on a model: each request is planned as it enters the language model, then packed."""

import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from windowquant.bound import Bound
from windowquant.cache.fingerprint import pixel_prints
from windowquant.cache.packed_cache import PackedCache, Planner
from windowquant.cache.recipe import Recipe
from windowquant.cache.request import CacheRequest
from windowquant.errors import UserError
from windowquant.kernels import get_backend
from windowquant.models import Prompt
from windowquant.online import pack_after_attention, watch_layers
from windowquant.planning import RequestPlanner, kv_shape

if TYPE_CHECKING:
    from windowquant.window_method import WindowMethod


class WindowBound(Bound):
    """Makes packed caches; see `Bound`."""

    method: "WindowMethod"

    def __init__(self, method: "WindowMethod", model: PreTrainedModel, processor: object = None) -> None:
        super().__init__(method, model, processor)
        self.sensitivity = method.sensitivity_of(model)
        if self.sensitivity is not None and len(self.sensitivity) != self.layers:
            raise UserError(
                f"{len(self.sensitivity)} layer sensitivities are given, but the model has {self.layers} layers; give "
                "one for each."
            )
        self._attend = get_backend(method.backend, self.device)

    def new_cache(self, inputs: Mapping[str, Any]) -> Cache:
        """See `Bound.new_cache`."""
        self._check_active()
        prompt = self.adapter.prompt(self.model, inputs)
        if prompt.visual_end == 0:
            warnings.warn("The prompt holds no visual tokens, so nothing is quantized.", stacklevel=2)
        kv = kv_shape(self.text_config)
        planner = RequestPlanner(self.method, prompt, self.layers, self.sensitivity, self._embed_text, kv)
        return self.cache_of(prompt, planner, pixel_prints(self.adapter, inputs))

    def cache_of(self, prompt: Prompt, planner: Planner, pixels: Mapping[str, str]) -> PackedCache:
        """An empty cache for a prompt whose plan comes from `planner`."""
        request = CacheRequest(prompt, self.recipe(), planner.row, self._attend, self._check_active, self.layers)
        return PackedCache(request, planner, self.layers, lambda: self.origin, pixels)

    def recipe(self) -> Recipe:
        """How caches made here store what their plans say."""
        return self.method.recipe()

    @torch.no_grad()
    def _embed_text(self, ids: Tensor) -> Tensor:
        return self.adapter.text_embeddings(self.model, ids)

    def _install(self, undo: ExitStack) -> None:
        super()._install(undo)
        decoder = self.adapter.decoder_layers(self.model)
        if self.sensitivity is None:
            watch_layers(decoder, self._cache_in, undo)
        pack_after_attention(decoder, self._cache_in, undo)
