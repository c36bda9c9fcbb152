"""The attention function that transformers calls inside a bound model, registered as "windowquant".

Plain tensors (the prefill, or any cache that is not ours) go to transformers' own SDPA path; a packed layer goes to the
backend kernel, and a layer that holds 16-bit tokens only goes to SDPA as well, so that an unquantized cache computes
exactly what transformers' own does.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

from windowquant.cache.view import KVView, PackedView

NAME = "windowquant"


def _causal(q_length: int, kv_length: int, device: torch.device) -> Tensor:
    """Bool [1, 1, q, kv]: the queries are the last columns, and each sees itself and everything before."""
    return torch.ones(q_length, kv_length, dtype=torch.bool, device=device).tril(kv_length - q_length)[None, None]


def _stored_order(mask: Tensor, view: PackedView) -> Tensor:
    """Columns of a mask [B or 1, 1, q, columns] in stored order, [B, 1, q, T]; empty slots are never attended."""
    order = view.order()
    picked = mask.expand(len(order), -1, -1, -1).take_along_dim(order.clamp(min=0)[:, None, None, :], dim=3)
    hidden = (order < 0)[:, None, None, :]
    return picked & ~hidden if mask.dtype == torch.bool else picked.masked_fill(hidden, torch.finfo(mask.dtype).min)


def _attend_plain(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    q_length, kv_length = query.shape[2], key.shape[2]
    if mask is None and 1 < q_length < kv_length:
        mask = _causal(q_length, kv_length, query.device)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _attend_packed(
    module: nn.Module, query: Tensor, view: PackedView, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    ordered = mask is not None or view.ragged
    if not view.stored.segments:
        if ordered:
            mask = _stored_order(_causal(query.shape[2], view.columns, query.device) if mask is None else mask, view)
        kept = view.stored.kept
        key, value = kept.k.to(query.dtype), kept.v.to(query.dtype)
        return _attend_plain(module, query, key, value, mask, scaling=scaling, **kwargs)
    out = view.attend(query, view.packed(ordered), mask, scaling)
    return out.transpose(1, 2).contiguous(), None


# torch.compile must not look into kernels, which take addresses. Asking first costs a step less than this wrapper.
_attend_untraced = torch.compiler.disable(_attend_packed)


def windowquant_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PackedView | KVView,
    value: Tensor | PackedView | KVView,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [B, Hq, t, D] over K and V [B, H, T, D], a packed layer, or any view of stored K and V
    that attends by itself: ([B, t, Hq, D], None).

    attention_mask: bool or additive [B, 1, t, columns] in the order of the prompt's columns, or None where the queries
    are simply the last columns, causal among themselves.
    """
    if isinstance(key, PackedView):
        attend = _attend_untraced if torch.compiler.is_compiling() else _attend_packed
        return attend(module, query, key, attention_mask, scaling, **kwargs)
    if not isinstance(key, Tensor):
        return key.attend(query, attention_mask, scaling).transpose(1, 2).contiguous(), None
    assert isinstance(value, Tensor)
    return _attend_plain(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def windowquant_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """The mask for `windowquant_attention`: None for plain causal attention without padding, else SDPA's bool mask."""
    plain = allow_is_causal_skip and mask_function is causal_mask_function
    if plain and (attention_mask is None or bool(attention_mask.all())):
        return None
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=allow_is_causal_skip,
        **kwargs,
    )


AttentionInterface.register(NAME, windowquant_attention)
AttentionMaskInterface.register(NAME, windowquant_mask)
