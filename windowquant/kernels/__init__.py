"""Attention over packed layers. Backends share one signature and are chosen by name or by device."""

from typing import Protocol

import torch
from torch import Tensor

from windowquant.core.packed import PackedLayer
from windowquant.errors import UserError
from windowquant.kernels import reference

__all__ = ["Backend", "backend_names", "get_backend"]


class Backend(Protocol):
    """Attention over a packed layer; `kernels.reference.attend` says what every backend takes and returns."""

    def __call__(self, q: Tensor, layer: PackedLayer, mask: Tensor | None, scaling: float) -> Tensor: ...


_BACKENDS: dict[str, Backend] = {"reference": reference.attend}
_DEFAULT = "reference"


def backend_names() -> list[str]:
    """Names that `get_backend` knows."""
    return sorted(_BACKENDS)


def get_backend(name: str | None = None, device: torch.device | str = "cpu") -> Backend:
    """The backend called `name`, or with None the default one for `device`. Raises UserError for an unknown name."""
    del device  # the reference runs anywhere and is the only one so far
    key = name or _DEFAULT
    if key not in _BACKENDS:
        raise UserError(f"There is no attention backend {key!r}; use one of {', '.join(backend_names())}.")
    return _BACKENDS[key]
