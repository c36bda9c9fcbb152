"""What a layer's attention works with, shown to whoever calibrates: queries, keys before and after RoPE, values."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from windowquant.models import Prompt, adapter_for

NAME = "windowquant_calibrate"


@dataclass(frozen=True, eq=False)
class States:
    """One layer's states of the n tokens of a prompt (all rows, padding left out), in the model's dtype.

    query [n, Hq, D], key [n, H, D]: as attention multiplies them, after RoPE. unrotated_key, value [n, H, D]: as the
    projection (and a norm after it, where there is one) leaves them.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    unrotated_key: Tensor


Seen = Callable[[int, States], None]
_watched: "WeakKeyDictionary[nn.Module, Callable[[Tensor, Tensor, Tensor], None]]" = WeakKeyDictionary()


def before_rope(self_attn: Any, kind: Literal["q", "k"]) -> nn.Module:
    """The module whose output RoPE rotates: the query or key projection, or the norm after it.

    Its output is [B, t, heads * D], or [B, t, heads, D] for a norm.
    """
    norm: nn.Module | None = getattr(self_attn, f"{kind}_norm", None)
    projection: nn.Module = getattr(self_attn, f"{kind}_proj")
    return norm if norm is not None else projection


def watch_states(model: PreTrainedModel, prompt: Prompt, seen: Seen, undo: ExitStack) -> None:
    """Call `seen(layer, states)` in every layer when `prompt` is run, in one pass and without a cache."""
    adapter = adapter_for(model)
    key, before = adapter.text_config_key, adapter.text_config(model)._attn_implementation
    undo.callback(model.set_attn_implementation, {key: before})
    model.set_attn_implementation({key: NAME})
    for index, layer in enumerate(adapter.decoder_layers(model)):
        _watch_layer(layer.self_attn, index, prompt, seen, undo)


def _watch_layer(self_attn: Any, index: int, prompt: Prompt, seen: Seen, undo: ExitStack) -> None:
    unrotated: list[Tensor] = []
    undo.callback(
        before_rope(self_attn, "k").register_forward_hook(lambda m, args, out: unrotated.append(out.detach())).remove
    )

    def attending(query: Tensor, key: Tensor, value: Tensor) -> None:
        attended = prompt.attended.to(query.device)
        plain = unrotated.pop().reshape(*attended.shape, key.shape[1], key.shape[3])
        q, k, v = (x.detach().transpose(1, 2)[attended] for x in (query, key, value))
        seen(index, States(q, k, v, plain[attended]))

    _watched[self_attn] = attending
    undo.callback(_watched.pop, self_attn)


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    _watched[module](query, key, value)
    return sdpa_attention_forward(module, query, key, value, *args, **kwargs)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
