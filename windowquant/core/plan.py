"""The plan: how many bits each window of each layer is kept in."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from windowquant.core.quantizer import WITHIN_WINDOWS, Granularity, ZeroPoint, storage_bytes
from windowquant.errors import UserError

PLAN_BITS = (16, 8, 4, 2, 1)


class KVShape(NamedTuple):
    """K and V of one token in one layer: `heads` KV heads (H) of `channels` (D) each."""

    heads: int
    channels: int


_ANY_SHAPE = KVShape(1, 8)  # for groups of one window and channel, whose share of the bits does not depend on it


@dataclass(frozen=True)
class BitPlan:
    """Bit-widths per layer and window; immutable.

    bits: [L][W], each one of 16 (kept as it is), 8, 4, 2, 1. W may be 0: nothing is quantized.
    window_size: tokens a window (S).
    made_by: how the plan came about, for the record (method and its hyper-parameters).
    v_bits: [L][W], the bits of V where they differ from those of K, which `bits` then are; None: `bits` are of both.
    alpha: of the thresholds that the plan was made with, or None if it was made without any.
    """

    bits: tuple[tuple[int, ...], ...]
    window_size: int
    made_by: str
    v_bits: tuple[tuple[int, ...], ...] | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        if self.window_size < 1:
            raise UserError(f"window_size of a plan is {self.window_size}; set it to 1 or more.")
        if not self.bits:
            raise UserError("A plan needs at least one layer, but its list of bits is empty.")
        _check_rows("the plan", self.bits, len(self.bits[0]))
        if self.v_bits is not None:
            _check_rows("the plan of V", self.v_bits, len(self.bits[0]))
            if len(self.v_bits) != len(self.bits):
                raise UserError(
                    f"The plan has {len(self.v_bits)} layers for V and {len(self.bits)} for K; give both the same."
                )

    @classmethod
    def from_tensor(
        cls, bits: Tensor, window_size: int, made_by: str, v_bits: Tensor | None = None, alpha: float | None = None
    ) -> "BitPlan":
        """Build a plan from integer tensors [L, W]."""
        return cls(_rows(bits), window_size, made_by, None if v_bits is None else _rows(v_bits), alpha)

    @property
    def layers(self) -> int:
        """Number of layers, L."""
        return len(self.bits)

    @property
    def windows(self) -> int:
        """Number of windows, W."""
        return len(self.bits[0])

    def tensor(self) -> Tensor:
        """The bits (of K, if V differs) as an int8 tensor [L, W]."""
        return self._tensor(self.bits)

    def v_tensor(self) -> Tensor:
        """The bits of V as an int8 tensor [L, W]."""
        return self._tensor(self.bits if self.v_bits is None else self.v_bits)

    def _tensor(self, rows: tuple[tuple[int, ...], ...]) -> Tensor:
        return torch.tensor(rows, dtype=torch.int8).reshape(self.layers, self.windows)

    def average_bits(
        self,
        metadata: bool = True,
        granularity: Granularity = "window_channel",
        kv: KVShape = _ANY_SHAPE,
        zero_point: ZeroPoint = "integer",
    ) -> float:
        """Mean bits per element of K and V of the windows; see `average_bits`."""
        return average_bits(self.tensor(), self.v_tensor(), self.window_size, metadata, granularity, kv, zero_point)

    def histogram(self) -> dict[int, float]:
        """Share of the windows at each bit-width in use, widest first; the shares sum to 1 (empty if W = 0).

        Each of the L * W windows counts once for its K and once for its V.
        """
        rows = self.bits + (self.bits if self.v_bits is None else self.v_bits)
        counts = Counter(width for row in rows for width in row)
        return {width: counts[width] / counts.total() for width in PLAN_BITS if counts[width]}


def average_bits(
    k: Tensor,
    v: Tensor,
    window_size: int,
    metadata: bool = True,
    granularity: Granularity = "window_channel",
    kv: KVShape = _ANY_SHAPE,
    zero_point: ZeroPoint = "integer",
) -> float:
    """Mean bits per element of K and V of the windows whose K has `k` and whose V has `v` bits, integer [L, W].

    Counted are the codes of every window, 16 bits an element of those that stay in 16 bit, and with `metadata` a 16-bit
    scale and (unless codes are symmetric) a 16-bit offset for each group of a quantized block: at "window_channel"
    32 / S bits an element, so that INT2 takes 3 bits and INT4 5 at S = 32. Other groups depend on the sizes `kv`. Not
    counted: text, tokens outside whole windows, room to grow. Without windows everything is 16 bit.
    """
    if k.numel() == 0:
        return 16.0
    held, window = 0, (1, kv.heads, 1, window_size, kv.channels)
    for k_bits, v_bits in _pairs(k, v):
        counts = ((k == k_bits) & (v == v_bits)).sum(1)  # windows that each layer stores together
        windows, blocks = int(counts.sum()), int((counts > 0).sum())
        for bits in (k_bits, v_bits):
            codes, scales = storage_bytes(window, bits, granularity, zero_point)
            held += codes * windows + metadata * scales * (windows if granularity in WITHIN_WINDOWS else blocks)
    return 8 * held / (2 * k.numel() * window_size * kv.heads * kv.channels)


def v_bits_of(k: Tensor, v_widths: Iterable[tuple[int, int]]) -> Tensor:
    """The bits of V [L, W] where K has `k` [L, W]; `v_widths`: pairs (bits of K, bits of V), any other is the same."""
    v = k.clone()
    for k_bits, v_bits in v_widths:
        v[k == k_bits] = v_bits
    return v


def check_widths(widths: Sequence[int], v_widths: Sequence[int] | None) -> None:
    """Raise UserError unless `widths` are three or four known bit-widths, falling, and `v_widths` as many, not rising.

    The classes of a search from the most relevant windows to the least, and the bits of their V (None: as K).
    """
    known = f"three or four of {', '.join(map(str, PLAN_BITS))}"
    if len(widths) not in (3, 4) or not set(widths) <= set(PLAN_BITS) or list(widths) != sorted(set(widths))[::-1]:
        raise UserError(f"widths is {list(widths)}; give {known}, the largest first, such as [16, 4, 2].")
    if v_widths is None:
        return
    ordered = set(v_widths) <= set(PLAN_BITS) and list(v_widths) == sorted(v_widths)[::-1]
    if len(v_widths) != len(widths) or not ordered:
        raise UserError(
            f"v_widths is {list(v_widths)}; give one bit-width out of {', '.join(map(str, PLAN_BITS))} for each of the "
            f"widths {list(widths)}, none larger than the one before it."
        )


def _pairs(k: Tensor, v: Tensor) -> list[tuple[int, int]]:
    """The pairs (bits of K, bits of V) that occur."""
    both = (k.int() * 32 + v).unique().tolist()
    return [divmod(code, 32) for code in both]


def _rows(bits: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in bits.tolist())


def _check_rows(plan: str, rows: tuple[tuple[int, ...], ...], windows: int) -> None:
    for layer, row in enumerate(rows):
        if len(row) != windows:
            raise UserError(
                f"Layer {layer} of {plan} has {len(row)} windows and layer 0 has {windows}; give every layer the same "
                "number."
            )
        unknown = sorted(set(row) - set(PLAN_BITS))
        if unknown:
            raise UserError(f"Layer {layer} of {plan} asks for {unknown} bits; use one of {list(PLAN_BITS)}.")
