"""What a CUDA graph does with a step, on the CPU: the same operators on the same memory, and no Python in between."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}


class Recorder(TorchDispatchMode):
    """Records the operators of a function, and runs them again with every argument as it was but tensors' values.

    Fails at operators whose answer the host would have to wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.out = torch.empty(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in _WAITS, f"{func} waits for the device"
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def record(self, function: Callable[[], Tensor]) -> Tensor:
        """Run `function`, once."""
        with self:
            self.out = function()
        return self.out.clone()

    @torch.no_grad()
    def replay(self) -> Tensor:
        """Run the operators again; what each one returned first gets its new values."""
        for func, args, kwargs, before in self.calls:
            given = {x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr() and old.data_ptr() not in given:
                    old.copy_(new)
        return self.out.clone()
