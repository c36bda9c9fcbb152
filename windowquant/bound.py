"""A method tied to a loaded model: installs what it needs on entering, removes all of it on leaving."""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from windowquant import attention, conversation
from windowquant.cache.origin import CacheOrigin
from windowquant.cache.packed_cache import Planner
from windowquant.cache.request_cache import RequestCache
from windowquant.calibrate.origin import fingerprint, model_name
from windowquant.compiled import check_not_wrapped, compile_anew
from windowquant.errors import UserError
from windowquant.models import Prompt, adapter_for, cache_keyword
from windowquant.models.features import VisualFeatures, take_features, visual_features

if TYPE_CHECKING:
    from windowquant.method import Method
    from windowquant.static_step import StaticStep

_bound_models: "WeakSet[PreTrainedModel]" = WeakSet()


class Bound:
    """A method at work on a model, between `with method.bind(model, processor) as bound:` and the end of that block.

    Inside, caches made by `new_cache` can be given to `model.generate` or to the model's `forward`, under the name
    `cache_keyword`; other caches and calls without a cache go on as before. Greedy decoding, sampling, beam search,
    several sequences a prompt, prompt lookup, streamers, stopping criteria and batches with left padding work. The
    language model's attention is SDPA here, whatever the model was loaded with. Afterwards the model is as it was.

    One video can be asked many things::

        cache = wq.encode(inputs)
        for question in questions:  # processor outputs, each with the same video first
            answer = model.generate(**wq.resume(cache, question), max_new_tokens=32)
        cache.save("video.safetensors")  # and another day: cache = wq.load_cache("video.safetensors")
    """

    def __init__(self, method: "Method", model: PreTrainedModel, processor: object = None) -> None:
        check_not_wrapped(model)
        self.method, self.model, self.processor = method, model, processor
        self.adapter = adapter_for(model)
        self.text_config = self.adapter.text_config(model)
        sliding = getattr(self.text_config, "sliding_window", None)
        kinds = getattr(self.text_config, "layer_types", None) or ["sliding_attention" if sliding else "full_attention"]
        if set(kinds) != {"full_attention"}:
            raise UserError(
                "A model with sliding-window attention layers is not supported; use one with full attention."
            )
        self.layers = int(self.text_config.num_hidden_layers)
        self.cache_keyword = cache_keyword(model)
        self._undo: ExitStack | None = None
        self._device: torch.device = self.adapter.language_model(model).embed_tokens.weight.device

    @property
    def device(self) -> torch.device:
        """Where the language model's first layer is."""
        return self._device

    def __enter__(self) -> "Bound":
        if self.model in _bound_models:
            raise UserError("A method is bound to this model already; leave its with block before binding another.")
        with ExitStack() as undo:
            _bound_models.add(self.model)
            undo.callback(_bound_models.discard, self.model)
            language_model = self.adapter.language_model(self.model)
            compile_anew(self.model, language_model)
            undo.callback(compile_anew, self.model, language_model)
            undo.callback(take_features(language_model).remove)
            self._install(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()

    def new_cache(self, inputs: Mapping[str, Any]) -> Cache:
        """An empty cache for these processor outputs: `input_ids` [B, T], and `attention_mask` if any row is padded.

        The prompt it is used with must be this one. Raises UserError outside the with block or without `input_ids`.
        """
        raise NotImplementedError

    def encode(self, inputs: Mapping[str, Any]) -> Cache:
        """A cache that holds everything up to the prompt's last visual token, packed: prefilled here, not yet asked.

        `resume` goes on from it with this prompt's question or with others. WindowQuant searches its plan once, with
        the text of the prompt given here: a question asked later finds the windows that suit this text in 16 bit, so
        give the question that matters most, or a prompt without one if none does. Text between and before the images
        or videos is prefilled in full precision and kept. A streaming method (KIVI, SKVQ) codes this text and the
        questions as well; to come back to the end of the video, its cache holds what was exact there twice once it is
        coded: as many tokens as the method keeps exact, at most. Raises UserError for a prompt without images or
        videos, or with nothing after them.
        """
        return conversation.encode(self, inputs)

    def resume(self, cache: Cache, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of `model.generate` for another prompt about the video in `cache`, which is taken back to it.

        inputs: processor outputs of a prompt that begins as the cached one does, at least up to the end of its last
        image or video: another question, or the conversation so far and its next turn. Pixels may be left out, and are
        never run again. Of the cache, the longest common beginning of both prompts is kept (by a streaming method, all
        up to the end of the video); the rest, and the answers generated so far, are forgotten (a turn that quotes them
        runs their tokens again, in one pass). Beams and several answers are reduced to one row a prompt. Raises
        UserError if the prompt or the pixels are others, for a streaming method's cache that `encode` did not make, and
        for transformers' own caches.
        """
        self._check_active()
        return conversation.resume(self, cache, inputs)

    def static_step(self, cache: Cache, max_new_tokens: int) -> "StaticStep":
        """The decode step on a packed cache with fixed shapes, for at most so many tokens a row: for CUDA graphs.

        The prompt must have been run, by `generate` for its first token or by the model's `forward` with positions that
        do not count padding::

            cache = wq.new_cache(inputs)
            tokens = model.generate(**inputs, cache=cache, max_new_tokens=1)[:, -1:]
            step = wq.static_step(cache, 31)
            for _ in range(31):
                tokens = step(tokens).argmax(-1, keepdim=True)

        Takes room for these tokens at once, and 8 bytes a stored token, row and layer. Attention reads the room, too.
        Raises UserError before the prompt is complete, for a model on several devices, and for caches of other kinds
        than packed windows.
        """
        from windowquant.static_step import StaticStep

        self._check_active()
        return StaticStep(self, cache, max_new_tokens)

    def load_cache(self, path: str | os.PathLike[str], inputs: Mapping[str, Any] | None = None) -> RequestCache:
        """The cache that `RequestCache.save` wrote to `path`: it answers as the saved one would have, bit for bit.

        With `inputs`, it is checked to be of their video (token ids up to its end, and pixels if given); `resume`
        checks the same later. Raises UserError, naming the file, if it is missing, damaged, written by a newer version,
        of another model, method or prompt; also for a method whose caches are transformers' own.
        """
        from windowquant.cache.saved import read

        self._check_active()
        return read(self, path, inputs)

    def cache_of(self, prompt: Prompt, planner: Planner, pixels: Mapping[str, str]) -> RequestCache:
        """An empty cache for a prompt whose plan, if the method makes any, comes from `planner`."""
        raise NotImplementedError

    @cached_property
    def origin(self) -> CacheOrigin:
        """What tells the bound model and method from others; see `CacheOrigin`."""
        structure, weights = fingerprint(self.model)
        dtype = self.adapter.language_model(self.model).embed_tokens.weight.dtype
        method, name = self.method.stored(), str(dtype).removeprefix("torch.")
        return CacheOrigin(model_name(self.model), structure, weights, name, method)

    def visual_features(self, inputs: Mapping[str, Any]) -> VisualFeatures:
        """Visual tokens [M, C] of one request as they enter the language model; see `models.features`."""
        return visual_features(self.adapter, self.model, inputs)

    def _check_active(self) -> None:
        if self._undo is None:
            raise UserError(
                "The method is not bound to the model now; make and use its caches inside "
                "`with method.bind(model, processor) as bound:`."
            )

    def _install(self, undo: ExitStack) -> None:
        for module in self.model.modules():
            if hasattr(module, "rope_deltas"):  # M-RoPE models keep this of their latest request
                undo.callback(setattr, module, "rope_deltas", module.rope_deltas)
        key, before = self.adapter.text_config_key, self.text_config._attn_implementation
        undo.callback(self.model.set_attn_implementation, {key: before})
        self.model.set_attn_implementation({key: attention.NAME})

        def hook(module: nn.Module, function: Callable[..., Any]) -> None:
            undo.callback(module.register_forward_pre_hook(function, with_kwargs=True).remove)

        hook(self.model, self._check_request)
        hook(self.model, self._place)
        hook(self.adapter.language_model(self.model), self._observe)

    def _cache_in(self, kwargs: Mapping[str, Any]) -> RequestCache | None:
        cache = kwargs.get(self.cache_keyword)
        return cache if isinstance(cache, RequestCache) else None

    def _check_request(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache, ids = self._cache_in(kwargs), kwargs.get("input_ids", args[0] if args else None)
        if cache is None or not isinstance(ids, Tensor) or ids.shape[1] == 1:
            return
        prompt, start, ids = cache.request.prompt, cache.get_seq_length(), ids.cpu()
        given = [kwargs.get(key) for key in self.adapter.pixel_keys]
        brings_pixels = any(value is not None and len(value) > 0 for value in given)
        if start > 0 and not brings_pixels and ids.shape[1] > start and _continues(prompt, 0, ids):
            raise UserError(
                "The whole prompt is run on a cache that holds it, as assisted decoding does; give it a new cache."
            )
        if (brings_pixels and start >= max(prompt.visual_end, 1)) or not _continues(prompt, start, ids):
            raise UserError(
                "The cache belongs to another prompt than the one it is used with; make a cache for each request with "
                "new_cache(inputs), or go on from this one's video with resume(cache, inputs)."
            )

    def _place(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Positions of a prompt whose model would otherwise count from those of its latest request."""
        cache, given = self._cache_in(kwargs), kwargs.get("input_ids", args[0] if args else kwargs.get("inputs_embeds"))
        if cache is None or not isinstance(given, Tensor):
            return None
        (rows, columns), start, prompt = given.shape[:2], cache.get_seq_length(), cache.request.prompt
        positions = prompt.position_ids(start, start + columns, rows // prompt.batch)
        return None if positions is None else (args, {**kwargs, "position_ids": positions.to(given.device)})

    def _observe(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache, embeds = self._cache_in(kwargs), kwargs.get("inputs_embeds")
        if cache is not None and isinstance(embeds, Tensor):
            cache.observe(embeds)


def _continues(prompt: Prompt, start: int, ids: Tensor) -> bool:
    """Whether `ids` [B or k * B, t] can be columns `start` and on: the prompt's own, and anything after its end."""
    own = prompt.input_ids[:, start : start + ids.shape[1]]
    times, rest = divmod(ids.shape[0], prompt.batch)
    return rest == 0 and bool((ids[:, : own.shape[1]] == own.repeat_interleave(times, 0)).all())
