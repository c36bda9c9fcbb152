"""Telling one video from another without reading all of it."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from windowquant.models import Adapter

_SAMPLES = 65_536


def tensor_print(x: Tensor) -> str:
    """A hash of the shape and of evenly spaced values, rounded to bfloat16 so that the dtype does not matter."""
    flat = x.detach().flatten()
    at = torch.arange(0, max(1, flat.numel()), max(1, flat.numel() // _SAMPLES), device=flat.device)[: flat.numel()]
    values = flat[at].to(torch.bfloat16).contiguous().cpu().view(torch.uint8)
    return hashlib.sha256(str(list(x.shape)).encode() + values.numpy().tobytes()).hexdigest()


def pixel_prints(adapter: Adapter, inputs: Mapping[str, Any]) -> dict[str, str]:
    """A hash for each of the tensors of pixels (or of their features) among processor outputs, by its key."""
    return dict(_prints({key: inputs.get(key) for key in (*adapter.pixel_keys, "visual_features")}))


def _prints(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield key, tensor_print(value)
        elif isinstance(value, list | tuple):
            yield from _prints({f"{key}.{i}": item for i, item in enumerate(value)})
