"""Several questions about one stored video: encode it once, then go on from there."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Cache

from windowquant.cache.fingerprint import pixel_prints
from windowquant.cache.request_cache import RequestCache
from windowquant.errors import UserError
from windowquant.models import Prompt
from windowquant.models.prompt import require_ids
from windowquant.prefill import first_columns

if TYPE_CHECKING:
    from windowquant.bound import Bound


@torch.no_grad()
def encode(bound: "Bound", inputs: Mapping[str, Any]) -> Cache:
    """A cache that holds the prompt up to its last visual token, packed; see `Bound.encode`."""
    prompt = bound.adapter.prompt(bound.model, inputs)
    if prompt.visual_end == 0:
        raise UserError("The prompt holds no image and no video to encode; use new_cache(inputs) and generate.")
    if prompt.visual_end == prompt.length:
        raise UserError("Nothing follows the video in the prompt; add the question, or at least the turn's end.")
    cache = bound.new_cache(inputs)
    first = first_columns(bound.adapter, bound.model, inputs, prompt.visual_end)
    if "attention_mask" in first:  # padding takes no positions, as in generate; M-RoPE models' are placed by `Bound`
        first["position_ids"] = (first["attention_mask"].long().cumsum(-1) - 1).clamp(min=0)
    bound.model(**first, **{bound.cache_keyword: cache}, use_cache=True, logits_to_keep=1)
    if isinstance(cache, RequestCache):
        cache.mark()
    return cache


def resume(bound: "Bound", cache: Cache, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Take the cache back to what it has in common with another prompt; see `Bound.resume`."""
    if not isinstance(cache, RequestCache):
        raise UserError(f"A {type(cache).__name__} does not store the video apart, so it cannot be taken back to it.")
    ids, attended = require_ids(inputs)
    held = cache.request.prompt
    if not cache.packed:
        raise UserError("The cache holds no video yet; make one with encode(inputs), or generate with it first.")
    _check_same_video(bound, cache, inputs)
    prompt = _continued(bound, held, ids, attended)
    seen = min(cache.get_seq_length(layer) for layer in range(len(cache.layers)))
    shared = min(_shared(held, prompt), seen, prompt.length - 1)
    if shared < held.visual_end:
        raise UserError(
            f"The prompt differs from the one in the cache at token {shared}, before the end of its video "
            f"({held.visual_end} tokens); encode this prompt on its own."
        )
    cache.go_back(cache.way_back(shared), prompt)
    given = {"input_ids": ids, "attention_mask": attended.long(), "position_ids": prompt.position_ids(0, prompt.length)}
    on_device = {key: value.to(bound.device) for key, value in given.items() if value is not None}
    return {**on_device, bound.cache_keyword: cache}


def _check_same_video(bound: "Bound", cache: RequestCache, inputs: Mapping[str, Any]) -> None:
    prints = pixel_prints(bound.adapter, inputs)
    if any(cache.pixels.get(key, value) != value for key, value in prints.items()):
        raise UserError("The inputs hold other images or videos than the cache; encode them on their own.")


def _shared(held: Prompt, prompt: Prompt) -> int:
    """The number of first columns that are the same in both prompts, for every row."""
    columns = min(held.length, prompt.length)
    pairs = ((held.input_ids, prompt.input_ids), (held.attended, prompt.attended))
    same = torch.stack([(a[:, :columns] == b[:, :columns]).all(0) for a, b in pairs]).all(0)
    return int(same.long().cumprod(0).sum())


def _continued(bound: "Bound", held: Prompt, ids: Tensor, attended: Tensor) -> Prompt:
    """The prompt `ids`, whose positions go on from those of `held`; UserError if it brings more to see."""
    if len(ids) != held.batch:
        raise UserError(f"The cache holds {held.batch} prompts and the inputs {len(ids)}; give as many as it does.")
    own, stored = (_padding(each) for each in (attended, held.attended))
    if own != stored:
        raise UserError(
            f"The prompts are padded on the left by {own} tokens, those in the cache by {stored}, and a stored video "
            "stays in its columns; ask questions that are equally long in every row, or each prompt by itself."
        )
    visual = bound.adapter.is_visual(bound.model, ids) & attended
    if visual[:, held.visual_end :].any():
        raise UserError("The prompt holds more images or videos than the cache; make a new cache for it.")
    return Prompt(ids, attended, visual, held.position_ids(0, ids.shape[1]))


def _padding(attended: Tensor) -> list[int]:
    """Columns in front of each row [B, T] that hold no token."""
    counts: list[int] = (attended.cumsum(1) == 0).sum(1).tolist()
    return counts
