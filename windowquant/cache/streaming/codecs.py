"""Ways to code tokens: which elements share a scale, and how the codes are laid out in memory."""

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from windowquant.core.packed import WindowBlock
from windowquant.core.quantizer import dequantize, quantize
from windowquant.errors import UserError


class Codec(Protocol):
    """Codes `block` tokens at a time, each block independently of all others.

    Codes and metadata are tensors [B, H', t / block, ...]; the first one is the codes.
    """

    @property
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def block(self) -> int:
        """Tokens coded together; appends come in multiples of it."""

    def identity(self) -> bytes:
        """What tells it from codecs that decode differently."""

    def token_bits(self, heads: int, head_dim: int) -> float:
        """Bits that one coded token of one row takes, its share of the metadata included."""

    def encode(self, x: Tensor, label: str) -> tuple[Tensor, ...]:
        """Code x [B, H, t, D]. Raises UserError, naming `label`, for NaN or infinity."""

    def decode(self, parts: tuple[Tensor, ...], heads: int) -> Tensor:
        """What parts of t tokens stand for: float32 [B, heads, t, D]."""


@dataclass(frozen=True)
class GroupCodec:
    """Asymmetric round-to-nearest codes of `bits` bits; the minimum of a group is its offset.

    axis: "channel": `group` consecutive tokens of one channel of one head share scale and minimum; "token": `group`
    consecutive channels of one token of one head do. Costs 32 / group bits an element beside the codes.
    """

    bits: int
    group: int
    axis: Literal["channel", "token"]

    @property
    def block(self) -> int:
        return self.group if self.axis == "channel" else 1

    def identity(self) -> bytes:
        return repr(self).encode()

    def token_bits(self, heads: int, head_dim: int) -> float:
        return heads * head_dim * (self.bits + 32 / self.group)

    def encode(self, x: Tensor, label: str) -> tuple[Tensor, ...]:
        if self.axis == "channel":
            coded = quantize(x.unflatten(2, (-1, self.group)), self.bits, "window_channel", "float", label)
        else:
            coded = quantize(x.unflatten(3, (-1, self.group)), self.bits, "token", "float", label)
        return coded.codes, coded.scale, coded.offset

    def decode(self, parts: tuple[Tensor, ...], heads: int) -> Tensor:
        codes, scale, offset = parts
        shape = (*codes.shape[:4], codes.shape[4] * 8 // self.bits)
        values = dequantize(WindowBlock(codes.contiguous(), scale, offset, self.bits, shape, self.axis))
        return values.flatten(2, 3) if self.axis == "channel" else values.flatten(3, 4)


def check_group(group: int, head_dim: int) -> None:
    """Raise UserError unless `group` channels divide a head of `head_dim`."""
    if group < 1 or head_dim % group:
        raise UserError(
            f"Groups of {group} channels do not divide this model's head_dim {head_dim}; set group to a divisor of it."
        )
