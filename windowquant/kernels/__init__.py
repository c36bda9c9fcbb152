"""Attention over packed layers. Backends share one signature and are chosen by name or by device.

A backend is a module with `attend`. It is imported when first asked for: numba and triton are heavy.
"""

import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windowquant.core.packed import PackedLayer, WindowBlock
from windowquant.core.quantizer import Granularity, ZeroPoint
from windowquant.core.similarity import Means, window_means
from windowquant.errors import UserError

__all__ = [
    "Backend",
    "Packer",
    "WindowQuantizer",
    "backend_names",
    "check_backend",
    "get_backend",
    "get_packer",
    "get_quantizer",
    "get_window_means",
]


class Backend(Protocol):
    """Attention over a packed layer; `kernels.reference.attend` says what every backend takes and returns."""

    def __call__(self, q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor: ...


class WindowQuantizer(Protocol):
    """Windows of K or V `x` [B, H, T, D] at `columns` (int64 [B, W, S]) as `core.quantizer.quantize` makes them."""

    def __call__(
        self,
        x: Tensor,
        columns: Tensor,
        bits: int,
        granularity: Granularity = ...,
        zero_point: ZeroPoint = ...,
        dtype: torch.dtype | None = ...,
        label: str = ...,
        peak: float | None = ...,
    ) -> WindowBlock: ...


class Packer(Protocol):
    """What is stored of K or V `x` [B, H, T, D] of a layer, made in one pass where it lies.

    columns: that of every stored token, [B, T'] with its last dimension contiguous; a negative one reads column 0: a
    slot that holds no token. segments: (bits, windows) of each, whose tokens are the first ones stored; one of 16 bits
    is copied. window_size: tokens a window. dtype: that of the storage, to which x is rounded first (None: its own).
    room: tokens of room after the others.

    Returns the blocks of the segments, as `core.quantizer` makes them, and the other tokens [B, H, T16 + room, D].
    Raises UserError, naming `label`, if a value is NaN or infinite in the storage dtype, and as `core.quantizer` does.
    """

    def __call__(
        self,
        x: Tensor,
        columns: NDArray[np.int64],
        segments: Sequence[tuple[int, int]],
        window_size: int,
        zero_point: ZeroPoint = ...,
        dtype: torch.dtype | None = ...,
        label: str = ...,
        peak: float | None = ...,
        room: int = ...,
    ) -> tuple[tuple[WindowBlock, ...], Tensor]: ...


_MODULES = {
    "cpu": "windowquant.kernels.cpu.attention",
    "reference": "windowquant.kernels.reference",
    "triton": "windowquant.kernels.triton_attention",
}
_PACKAGES = {"cpu": "numba", "triton": "triton"}
_DEFAULTS = {"cpu": "cpu", "cuda": "triton"}
_PACKERS = {"cpu": "windowquant.kernels.cpu.quantize"}
_QUANTIZERS = {"triton": "windowquant.kernels.triton_quantize"}


def backend_names() -> list[str]:
    """Names that `get_backend` knows."""
    return sorted(_MODULES)


def check_backend(name: str | None) -> None:
    """Raise UserError, listing the known names, for a name that `get_backend` does not know."""
    if name is not None and name not in _MODULES:
        raise UserError(f"There is no attention backend {name!r}; use one of {', '.join(backend_names())}.")


def get_backend(name: str | None = None, device: torch.device | str = "cpu") -> Backend:
    """The backend called `name`, or with None the default one for `device`.

    "reference" runs anywhere and is the default where there is no other; "cpu" on the CPU; "triton" on CUDA, or
    anywhere under Triton's interpreter (TRITON_INTERPRET=1). Raises UserError for an unknown name, a missing package,
    and a device on which the backend cannot run.
    """
    device = torch.device(device)
    key = name or _DEFAULTS.get(device.type, "reference")
    check_backend(key)
    package = _PACKAGES.get(key)
    if package and not _installed(package):
        raise UserError(
            f"The attention backend {key!r} needs the package {package}, which is not installed; install it, or set "
            "backend=reference."
        )
    _check_device(key, device)
    return cast(Backend, import_module(_MODULES[key]).attend)


def get_packer(x: Tensor, granularity: str, dtype: torch.dtype) -> Packer | None:
    """What packs K or V like `x` [B, H, T, D] of a layer, stored in `dtype`, in one pass; None where there is none."""
    if x.stride(-1) != 1:
        return None
    return _packer(x.device.type, granularity, x.dtype, dtype, x.shape[-1])


@lru_cache
def _packer(device: str, granularity: str, given: torch.dtype, stored: torch.dtype, channels: int) -> Packer | None:
    module = _module_for(device, _PACKERS)
    return cast(Packer, module.store_tokens) if module and module.takes(granularity, given, stored, channels) else None


def get_quantizer(x: Tensor, granularity: str, dtype: torch.dtype) -> WindowQuantizer | None:
    """What quantizes windows of K or V like `x` [B, H, T, D], stored in `dtype`, in one pass where they lie.

    None where there is nothing better than `core.quantizer`, whose blocks are the same bit for bit.
    """
    module = _module_for(x.device.type, _QUANTIZERS)
    return cast(WindowQuantizer, module.quantize_windows) if module and module.takes(x, granularity, dtype) else None


def _module_for(device: str, modules: Mapping[str, str]) -> Any:
    """Of the default backend for a type of device, None if it is not among `modules` or its package is missing."""
    name = _DEFAULTS.get(device, "")
    return import_module(modules[name]) if name in modules and _installed(_PACKAGES[name]) else None


@lru_cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def get_window_means(device: torch.device) -> Means:
    """What goes through the embeddings of a video on `device`, for `core.similarity.window_scores`."""
    if device.type != "cuda" or not _installed(_PACKAGES["triton"]):
        return window_means
    return cast(Means, import_module("windowquant.kernels.triton_similarity").window_means)


def _check_device(key: str, device: torch.device) -> None:
    if key == "triton" and os.environ.get("TRITON_INTERPRET") != "1" and device.type != "cuda":
        raise UserError(
            f"The attention backend 'triton' needs a CUDA device, but the model is on {device.type}; move the model "
            "there, leave backend unset, or set TRITON_INTERPRET=1 to run it slowly in Triton's interpreter."
        )
    if key == "cpu" and device.type != "cpu":
        raise UserError(
            f"The attention backend 'cpu' computes on the CPU, but the model is on {device.type}; leave backend unset."
        )
