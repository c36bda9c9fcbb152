"""Which model and which method a cache is of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_TOLERANCE = 1e-5  # of a weight norm: sums of float32 on different devices agree to less


@dataclass(frozen=True)
class CacheOrigin:
    """Model and method of a packed cache.

    model: name or path when it was made. structure, weights: of the language model, as `calibrate.origin.fingerprint`
    gives them. dtype: of its weights. method: `Method.described()`, whatever backend it attends with.
    """

    model: str
    structure: str
    weights: tuple[float, ...]
    dtype: str
    method: str

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "CacheOrigin":
        """Undo `dataclasses.asdict` and JSON."""
        return cls(**{**values, "weights": tuple(values["weights"])})

    def same_weights(self, other: "CacheOrigin") -> bool:
        """Whether the weights of two models of the same structure and dtype are the same, under whatever name."""
        return all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(self.weights, other.weights, strict=True))
