"""Transformers' own quantized cache, which says what it holds."""

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import QuantizedCache

from windowquant.cache.kv_bytes import KVBytes, tensor_bytes
from windowquant.errors import UserError


class StockQuantizedCache(QuantizedCache):
    """`QuantizedCache` as it is, with a count of the bytes that its back end's tensors hold.

    The whole first update, of text as of the video, is quantized at once; what comes later stays in the model's dtype
    until `residual_length` of it are there, and then everything is quantized again from its rounded values (the fp8
    back end has no residual and appends). Raises UserError where a back end cannot group the tensors it is given.
    """

    def __init__(self, backend: str, config: Any, **options: int) -> None:
        super().__init__(backend, config, **options)
        self._backend = backend

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See `Cache.update`."""
        try:
            return super().update(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (ValueError, AssertionError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or "an assertion of its own fails"
            raise UserError(
                f"The {self._backend} back end cannot quantize K and V of shape {list(args[0].shape)} ({reason}); set "
                "another q_group_size or axis."
            ) from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raises UserError: transformers' back ends hold what has no form to be written in."""
        raise UserError(
            f"The {self._backend} back end of transformers' QuantizedCache cannot be saved; use a method with a cache "
            "of windowquant's, such as kivi or rtn_int4."
        )

    def nbytes(self) -> KVBytes:
        """Bytes held: codes, scales with zeros or shifts, as `tail` what waits in the model's dtype, beams' order."""
        codes = scales = tail = index = 0
        for layer in self.layers:
            for tensor in _stored(layer):
                if tensor.dtype in (torch.uint8, torch.int32, torch.float8_e4m3fn):
                    codes += tensor_bytes(tensor)
                else:
                    scales += tensor_bytes(tensor)
            tail += tensor_bytes(*(x for x in (layer.keys, layer.values) if x is not None))
            waiting = getattr(layer, "_pending_beam_idx", None)
            index += 0 if waiting is None else tensor_bytes(waiting)
        return KVBytes(codes=codes, scale_zero=scales, tail=tail, index=index)

    def visual_bits(self) -> float:
        """Bits held per element of what is quantized, the visual tokens among it; scales included."""
        held = self.nbytes()
        elements = sum(_shape(x).numel() for layer in self.layers for x in _quantized(layer))
        return 8 * (held.codes + held.scale_zero) / elements if elements else float("nan")


def _quantized(layer: Any) -> list[Any]:
    """K and V as the back end holds them: a tensor subclass, or a tensor and what belongs to it."""
    return [x for x in (layer._quantized_keys, layer._quantized_values) if x is not None]


def _shape(stored: Any) -> torch.Size:
    """Shape of the K or V that was quantized."""
    if isinstance(stored, Tensor):
        return stored.shape
    codes, rest = stored
    return torch.Size(rest["shape"]) if isinstance(rest, dict) else codes.shape


def _stored(layer: Any) -> Iterator[Tensor]:
    """Plain tensors that hold a layer's quantized K and V."""
    for stored in _quantized(layer):
        yield from _plain(stored)


def _plain(thing: Any) -> Iterator[Tensor]:
    if hasattr(thing, "__tensor_flatten__"):
        for name in thing.__tensor_flatten__()[0]:
            yield from _plain(getattr(thing, name))
    elif isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict | tuple | list):
        for child in thing.values() if isinstance(thing, dict) else thing:
            yield from _plain(child)
