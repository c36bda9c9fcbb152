"""One decode step of fixed shapes: captured in a CUDA graph where there is one, or compiled."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from windowquant.cache.layer import PackedCacheLayer
from windowquant.cache.packed_cache import PackedCache
from windowquant.cache.static import StaticLayer
from windowquant.errors import UserError
from windowquant.models import Prompt

if TYPE_CHECKING:
    from windowquant.bound import Bound


class StaticStep:
    """Runs one token a row on a packed cache; made by `Bound.static_step`.

    No shape changes from step to step and nothing waits for the device, so on CUDA the second call captures the step
    in a CUDA graph, which later calls replay. The cache stays an ordinary one, and knows of every token run here.
    """

    def __init__(self, bound: "Bound", cache: Cache, max_new_tokens: int) -> None:
        """See `Bound.static_step`."""
        self._cache = _checked(cache, bound.device, max_new_tokens)
        request = self._cache.request
        self._prompt, self._left, self._seen = request.prompt, max_new_tokens, self._cache.get_seq_length()
        rows = self._cache.layers[0].rows()
        times = rows // self._prompt.batch
        self._tokens = torch.zeros(rows, 1, dtype=torch.int64, device=bound.device)
        self._positions = _positions(self._prompt, self._seen, times).to(bound.device)
        self._written = torch.zeros(1, dtype=torch.int64, device=bound.device)
        padding = ~self._prompt.attended.repeat_interleave(times, 0).to(bound.device)
        self._layers = [
            StaticLayer(layer, self._written, max_new_tokens, padding, request.attend) for layer in self._cache.layers
        ]
        self._model, self._given = bound.model, {bound.cache_keyword: Cache(layers=self._layers)}
        self._warm, self._graph, self._logits = False, None, torch.empty(0)

    _graph: torch.cuda.CUDAGraph | None

    @property
    def captured(self) -> bool:
        """Whether calls replay a CUDA graph by now."""
        return self._graph is not None

    def compile(self, **options: Any) -> None:
        """Compile the step by `torch.compile` with these options; on CUDA it is captured all the same.

        So choose no mode that makes CUDA graphs of its own ("reduce-overhead").
        """
        self._forward = torch.compile(self._forward, **options)  # type: ignore[method-assign]

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits [B, vocabulary] after the next token of each row, int64 [B, 1].

        Raises UserError for another shape, once `max_new_tokens` were run, and if the cache was used elsewhere since.
        """
        self._check(tokens)
        self._tokens.copy_(tokens)
        out = self._replayed() if self._tokens.is_cuda and self._warm else self._forward()
        self._warm = True
        for layer in self._cache.layers:
            layer.count_written(1)
        self._left, self._seen = self._left - 1, self._seen + 1
        return out

    @torch.no_grad()
    def _forward(self) -> Tensor:
        found = self._model(input_ids=self._tokens, position_ids=self._positions, use_cache=True, **self._given)
        self._written.add_(1)
        self._positions.add_(1)
        return found.logits[:, -1]

    def _replayed(self) -> Tensor:
        if self._graph is None:  # kernels are tuned and tables made by now
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._logits = self._forward()
        self._graph.replay()
        return self._logits.clone()

    def _check(self, tokens: Tensor) -> None:
        request = self._cache.request
        request.check_usable()
        if not isinstance(tokens, Tensor) or tokens.shape != self._tokens.shape or tokens.is_floating_point():
            given = f"{list(tokens.shape)} of {tokens.dtype}" if isinstance(tokens, Tensor) else repr(tokens)
            raise UserError(
                f"A static step takes token ids of shape {list(self._tokens.shape)}, one a row, not {given}."
            )
        if self._left == 0:
            raise UserError("The room of this static step is used up; make it with a larger max_new_tokens.")
        same = zip(self._layers, self._cache.layers, strict=True)
        if (
            request.prompt is not self._prompt
            or self._cache.get_seq_length() != self._seen
            or not all(static.writes_into(layer) for static, layer in same)
        ):
            raise UserError("The cache was used elsewhere since; make a new one with static_step(cache, ...).")


def _checked(cache: Cache, device: torch.device, tokens: int) -> PackedCache:
    if not isinstance(cache, PackedCache) or any(type(layer) is not PackedCacheLayer for layer in cache.layers):
        raise UserError(
            "A static step needs a cache of packed windows; use generate with streaming methods, those that plan by "
            "token, and transformers' own caches."
        )
    if not cache.packed or cache.get_seq_length() < cache.request.prompt.length:
        raise UserError("The cache holds no complete prompt yet; run the prefill first.")
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise UserError(f"max_new_tokens is {tokens!r}; give a whole number above 0.")
    if any(layer.state().stored.kept.k.device != device for layer in cache.layers):
        raise UserError("A static step needs the whole language model on one device; load it without a device_map.")
    return cache


def _positions(prompt: Prompt, column: int, times: int) -> Tensor:
    """Rotary positions of a column after the prompt, as `generate` counts them: [B * times, 1], M-RoPE [P, ...]."""
    found = prompt.position_ids(column, column + 1, times)
    if found is not None:
        return found
    counted = prompt.attended.sum(1, keepdim=True) + column - prompt.length
    return counted.repeat_interleave(times, 0)
