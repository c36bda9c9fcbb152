"""Methods that use transformers' own caches: the model is left alone, and so are its attention and its dtype."""

import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from transformers import Cache, PreTrainedModel

from windowquant.bound import Bound
from windowquant.cache.request_cache import RequestCache
from windowquant.cache.stock import StockQuantizedCache
from windowquant.errors import UserError
from windowquant.method import Method, Status


@dataclass(frozen=True)
class StockMethod(Method):
    """A cache of transformers, made by `make_cache`."""

    @abstractmethod
    def make_cache(self, text_config: Any) -> Cache:
        """An empty cache for a language model of this configuration."""

    def prepare(self, model: PreTrainedModel, undo: ExitStack) -> None:
        """What a back end needs while the method is bound."""

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        return StockBound(self, model, processor)


class StockBound(Bound):
    """Installs nothing in the model and makes transformers' caches."""

    method: StockMethod

    def _install(self, undo: ExitStack) -> None:
        self.method.prepare(self.model, undo)

    def new_cache(self, inputs: Mapping[str, Any]) -> Cache:
        """An empty cache; see `Bound.new_cache`."""
        self._check_active()
        return self.method.make_cache(self.text_config)

    def load_cache(self, path: str | os.PathLike[str], inputs: Mapping[str, Any] | None = None) -> RequestCache:
        """Raises UserError: there are no such files."""
        raise UserError(
            f"{self.method.name} makes transformers' own caches, which cannot be saved, so {path} cannot be loaded; "
            "bind the method that saved it."
        )


@dataclass(frozen=True)
class StockQuantized(StockMethod):
    """A back end of transformers' `QuantizedCache`, as its users know it. Official: nothing of it is changed.

    Keys are quantized after RoPE, text as well as the video, and the forward pass that brings them sees them exact.
    Raises UserError on binding if the back end is missing.
    """

    declared: ClassVar[Status] = "official"

    def options(self) -> dict[str, int]:
        """What `QuantizedCache` is given: the hyper-parameters."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def backend_name(self) -> str:
        """The back end, as `QuantizedCache` calls it."""
        return self.name.removeprefix("hf_").split("_")[0]

    def make_cache(self, text_config: Any) -> Cache:
        try:
            return StockQuantizedCache(self.backend_name, text_config, **self.options())
        except (ImportError, ValueError) as error:
            reason = " ".join(str(error).split())
            hint = " (pip install 'windowquant[stock]')" if isinstance(error, ImportError) else ""
            raise UserError(f"{self.name} cannot be used here{hint}: {reason}") from error

    def bind(self, model: PreTrainedModel, processor: object = None) -> Bound:
        bound = super().bind(model, processor)
        self.make_cache(bound.text_config)  # says now what is missing or does not fit
        return bound
