"""WindowQuant: mixed-precision KV cache quantization for video language models, one bit-width per window.

The names below load on first use, so that `windowquant.core` and `windowquant.kernels` stay free of transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windowquant.cache.packed_cache import PackedCache
    from windowquant.errors import UserError
    from windowquant.method import Bound, Method, get_method, method_names
    from windowquant.protocols import Reply, Session, answer
    from windowquant.window_method import WindowMethod
    from windowquant.windowquant_method import WindowQuant

__all__ = [
    "Bound",
    "Method",
    "PackedCache",
    "Reply",
    "Session",
    "UserError",
    "WindowMethod",
    "WindowQuant",
    "answer",
    "get_method",
    "method_names",
]

_HOME = {
    "Bound": "windowquant.method",
    "Method": "windowquant.method",
    "PackedCache": "windowquant.cache.packed_cache",
    "Reply": "windowquant.protocols",
    "Session": "windowquant.protocols",
    "UserError": "windowquant.errors",
    "WindowMethod": "windowquant.window_method",
    "WindowQuant": "windowquant.windowquant_method",
    "answer": "windowquant.protocols",
    "get_method": "windowquant.method",
    "method_names": "windowquant.method",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'windowquant' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
