"""A cache as JSON that names its tensors, and back.

Containers are taken apart by their dataclass fields, so a new field or a new container among these modules needs no
change here.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from windowquant.cache import layer, pack, tiered
from windowquant.cache.growing import GrowingKV
from windowquant.cache.streaming import state
from windowquant.core import packed, plan
from windowquant.models import prompt

_MODULES = (packed, plan, pack, layer, tiered, prompt, state)


def _containers() -> dict[str, Callable[..., Any]]:
    """The dataclasses that these modules define, by name."""
    found = [kind for module in _MODULES for kind in vars(module).values() if isinstance(kind, type)]
    names = {module.__name__ for module in _MODULES}
    return {kind.__name__: kind for kind in found if is_dataclass(kind) and kind.__module__ in names}


_TYPES = _containers()


def take_apart(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON can hold of `value`; its tensors go into `tensors` under names that begin with `name`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, GrowingKV):
        own = {"k": value.k, "v": value.v, "capacity": value.length + value.slack}
        return {"type": "GrowingKV", **_each(own, name, tensors)}
    if is_dataclass(value):
        own = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        return {"type": type(value).__name__, **_each(own, name, tensors)}
    if isinstance(value, tuple | list):
        return [take_apart(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
    return value


def _each(values: Mapping[str, Any], name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {key: take_apart(value, f"{name}.{key}", tensors) for key, value in values.items()}


def put_together(tree: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Undo `take_apart`; sequences become tuples. Raises KeyError or TypeError for a tree of something else."""
    if isinstance(tree, list):
        return tuple(put_together(item, tensor) for item in tree)
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensor(tree["tensor"])
    own = {key: put_together(value, tensor) for key, value in tree.items() if key != "type"}
    return GrowingKV.of_capacity(**own) if tree["type"] == "GrowingKV" else _TYPES[tree["type"]](**own)
