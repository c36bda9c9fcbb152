"""What a method is, what binding it to a model gives, and how methods are found by name."""

from dataclasses import dataclass, fields
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, Literal

from transformers import PreTrainedModel

from windowquant.bound import Bound
from windowquant.errors import UserError

__all__ = ["Bound", "Method", "Status", "get_method", "method_names"]

Status = Literal["paper", "official", "variant", "control"]
"""What a row of a table is: the paper's own method, a published method as its authors run it (the class names what
deviates), a published idea where the publication leaves open what becomes of a KV cache, or a control."""

_METHODS: dict[str, type["Method"]] = {}


@dataclass(frozen=True)
class Method:
    """A way to store the KV cache: a frozen dataclass of hyper-parameters that can be bound to a model.

    Used in three lines on a stock `from_pretrained` model, and undone on leaving the block::

        with WindowQuant(alpha=2.0).bind(model, processor) as wq:
            out = model.generate(**inputs, cache=wq.new_cache(inputs), max_new_tokens=32)

    Older versions of transformers call the argument `past_key_values`; `wq.cache_keyword` is the name the model takes.

    A subclass with a `name` of its own is found by `get_method`; one in `baselines/` needs no other registration. Three
    kinds derive from this one: `window_method.WindowMethod` gives each window of visual tokens a bit-width and has one
    verb to override, `bits`; `streaming_method.StreamingMethod` codes every token as it ages;
    `stock_method.StockMethod` makes transformers' own caches. Raises UserError for a value out of range.
    """

    name: ClassVar[str] = ""
    declared: ClassVar[Status] = "variant"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in cls.__dict__:
            _METHODS[cls.name] = cls

    def __post_init__(self) -> None:
        """Check the values."""

    @property
    def status(self) -> Status:
        """What tables call this method, with these hyper-parameters."""
        return self.declared

    def _check(self, field: str, known: tuple[str, ...]) -> None:
        if getattr(self, field) not in known:
            raise UserError(f"{field} is {getattr(self, field)!r}; use one of {', '.join(known)}.")

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        """Tie the method to a loaded model; the result is a context manager, within which caches can be made.

        `processor` is not needed by any method here and may be None. Raises UserError for a model whose visual tokens
        cannot be located, and for one that is bound already.
        """
        raise NotImplementedError

    def frames(self, frames: int) -> int:
        """How many frames of each video an evaluation is to show, where the model's settings say `frames`."""
        return frames

    def described(self) -> str:
        """Name and hyper-parameters, for records: `windowquant(alpha=2.0, ...)`."""
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return f"{self.name}({values})"

    def stored(self) -> str:
        """The same of what decides the content of a cache; it tells saved caches apart."""
        return self.described()


def _load_methods() -> dict[str, type[Method]]:
    """Import every module that defines methods; they register themselves."""
    import baselines

    import_module("windowquant.windowquant_method")
    for module in iter_modules(baselines.__path__):
        import_module(f"baselines.{module.name}")
    return _METHODS


def method_names() -> list[str]:
    """Every known method name, sorted."""
    return sorted(_load_methods())


def get_method(name: str, **params: Any) -> Method:
    """The method called `name` with the given hyper-parameters.

    Raises UserError for an unknown name (listing the known ones), an unknown hyper-parameter, or a value out of range.
    """
    methods = _load_methods()
    if name not in methods:
        raise UserError(f"Unknown method {name!r}; known methods: {', '.join(sorted(methods))}.")
    known = [field.name for field in fields(methods[name])]
    for param in params:
        if param not in known:
            raise UserError(f"Method {name!r} has no hyper-parameter {param!r}; it has {', '.join(known) or 'none'}.")
    return methods[name](**params)
