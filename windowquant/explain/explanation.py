"""The numbers behind the picture of one request."""

import io
from bisect import bisect_right
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from os import PathLike
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from windowquant.cache.kv_bytes import KVBytes
from windowquant.core.plan import BitPlan
from windowquant.protocols import Protocol


@dataclass(frozen=True)
class Explanation:
    """One answered request: how its windows scored, how each layer keeps them, and what that holds in bytes.

    model: name of the checkpoint; stand_in: whether it is one of the package's small trained models. method: its name
    and hyper-parameters; method_name: the name alone. question, answer: plain text.
    window_size: visual tokens a window, S; the usual 32 for a method that cuts none. picture_tokens: visual tokens of
    each image or frame (or of the frames that the architecture merges), in the prompt's order; their sum is M.
    scores: of each window [W]; None for a method that looks at no content, as are sensitivity (s_l) and thresholds
    ((T_low, T_high) as used) of each layer [L], which only scores are compared with. widths: the bit-widths that these
    thresholds choose from, largest first; of four, the two in the middle are told apart by s_l.
    plan: bits[L, W], W = 0 where no window is cut; None for a cache that is not ours. drops_visual: whether all visual
    tokens were discarded after prefill. bits: share of the visual tokens (mean over layers) at each bit-width, 0 for
    dropped ones; average_bits: held per element of their K and V, scales included.
    kv: bytes held at the end of the answer. fp16_bytes: what all its tokens would take in 16 bits.
    frames: what the model was shown, reduced, uint8 [h, w, 3] each; None where they were not given.
    """

    model: str
    stand_in: bool
    method_name: str
    method: str
    protocol: Protocol
    question: str
    answer: str
    window_size: int
    picture_tokens: tuple[int, ...]
    scores: tuple[float, ...] | None
    sensitivity: tuple[float, ...] | None
    thresholds: tuple[tuple[float, float], ...] | None
    widths: tuple[int, ...]
    plan: BitPlan | None
    drops_visual: bool
    bits: dict[int, float]
    average_bits: float
    kv: KVBytes
    fp16_bytes: int
    frames: tuple[np.ndarray, ...] | None = field(default=None, repr=False, compare=False)

    @property
    def visual_tokens(self) -> int:
        """Visual tokens of the prompt, M."""
        return sum(self.picture_tokens)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First and last picture that each whole window takes tokens from, counted from 0: [M // S]."""
        size = self.window_size
        starts = range(0, self.visual_tokens - size + 1, size)
        return tuple((self.picture_at(start), self.picture_at(start + size - 1)) for start in starts)

    @property
    def saved_bytes(self) -> int:
        """How much less than 16 bits take; negative where a float32 model keeps its own dtype."""
        return self.fp16_bytes - self.kv.total

    def picture_at(self, token: int) -> int:
        """Index of the picture that holds visual token `token`, 0 <= token < M."""
        return bisect_right(list(accumulate(self.picture_tokens)), token)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the frames, ready for `json.dump`."""
        return {
            **{name: value for name, value in vars(self).items() if name not in {"frames", "plan"}},
            "visual_tokens": self.visual_tokens,
            "spans": self.spans,
            "alpha": self.plan and self.plan.alpha,
            "plan": self.plan and self.plan.bits,
            "v_plan": self.plan and self.plan.v_bits,
            "bits": {str(width): share for width, share in self.bits.items()},
            "kv": {**asdict(self.kv), "total": self.kv.total},
            "saved_bytes": self.saved_bytes,
        }

    def figure(self) -> Figure:
        """The picture, as a matplotlib figure that no GUI knows of."""
        from windowquant.explain.picture import picture

        return picture(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture as PNG, SVG or PDF, by the name's ending; UserError for another ending or no place."""
        from windowquant.report.save import save_figure

        save_figure(self.figure(), path)

    def _repr_png_(self) -> bytes:
        """How a notebook shows it."""
        buffer = io.BytesIO()
        self.figure().savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()
