"""Reading a document through a method's packed cache."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.bound import Bound
from windowquant.cache.kv_bytes import kv_bytes, visual_bits
from windowquant.planning import kv_shape


@dataclass(frozen=True)
class Reading:
    """A document as read through one method.

    nll: mean negative log-likelihood of the scored tokens, nats. bits: held per element of K and V of the context's
    tokens, scales included. cache_bits: of all tokens, without room to grow. kv_bytes: bytes held at the end, room
    included. seconds: that all of it took.
    """

    nll: float
    bits: float
    cache_bits: float
    kv_bytes: int
    seconds: float


@torch.no_grad()
def read(bound: Bound, document: Tensor, context: int, chunk: int) -> Reading:
    """Prefill `context` tokens of a document [T] into a new cache, then score the rest, teacher-forced.

    The prefill attends exactly, as in every method here; token `context` + 1 and later ones are predicted by queries
    that read the packed cache, in forward passes of `chunk` tokens, and the tokens they bring join the cache as in
    decoding. Token `context`, which the exact prefill predicts, is not scored. The method is bound within
    `span.span_of_text(model, context)`.
    """
    start = time.perf_counter()
    ids = document[None].to(bound.device)
    cache = bound.new_cache({"input_ids": ids})
    own = {bound.cache_keyword: cache, "use_cache": True}
    embeds = bound.model.get_input_embeddings()(ids[:, :context])  # as a vision-language model gets its prefill
    bound.model(inputs_embeds=embeds, logits_to_keep=1, **own)
    total = torch.zeros((), dtype=torch.float64)
    for first in range(context, ids.shape[1] - 1, chunk):
        last = min(first + chunk, ids.shape[1] - 1)
        logits = bound.model(input_ids=ids[:, first:last], **own).logits[0].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, first + 1 : last + 1], reduction="sum").double().cpu()
    scored = ids.shape[1] - 1 - context
    held, shape = kv_bytes(cache), kv_shape(bound.text_config)
    elements = 2 * bound.layers * shape.heads * shape.channels * cache.get_seq_length()
    return Reading(
        nll=float(total) / scored,
        bits=visual_bits(cache, context),
        cache_bits=8 * (held.total - held.slack) / elements,
        kv_bytes=held.total,
        seconds=time.perf_counter() - start,
    )
