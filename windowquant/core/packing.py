"""Codes of 8, 4, 2 or 1 bits, packed 1, 2, 4 or 8 to a byte along the channels.

Layout: with p = 8 / bits codes a byte, the D channels are cut into p planes of D / p consecutive channels, and byte j
holds channel j of every plane, plane i in bits [i * bits, (i + 1) * bits). Channels, not tokens, are packed because D
is a multiple of 8 while a window may have any number of tokens; planes, not neighbours, because one shift and one mask
then yield D / p consecutive channels, for K (a slice of q is dotted with them) as for V (a slice of the output).
"""

from functools import lru_cache

import torch
from torch import Tensor

from windowquant.errors import UserError

CODE_BITS = (8, 4, 2, 1)
_WIDE = (torch.int64, torch.int32, torch.int16, torch.uint8)


@lru_cache
def _words(bits: int, row_bytes: int, device: torch.device) -> tuple[torch.dtype, Tensor, int]:
    """How to unpack rows of `row_bytes` by whole words: their integer type, each plane's shift [p, 1], the mask."""
    wide = next(dtype for dtype in _WIDE if row_bytes % dtype.itemsize == 0)
    shifts = torch.arange(0, 8, bits, dtype=wide, device=device).unsqueeze(-1)
    return wide, shifts, int.from_bytes(bytes([2**bits - 1]) * wide.itemsize, "little")


def check_bits(bits: int) -> None:
    """Raise UserError unless codes of `bits` bits can be packed."""
    if bits not in CODE_BITS:
        raise UserError(f"Codes of {bits} bits cannot be packed; use one of {list(CODE_BITS)}.")


def packed_bytes(channels: int, bits: int) -> int:
    """Bytes that the codes of `channels` channels take.

    Raises UserError if they are not a multiple of the 8 / bits codes that share a byte.
    """
    check_bits(bits)
    if channels % (8 // bits):
        raise UserError(
            f"head_dim {channels} is not a multiple of {8 // bits}, so {bits}-bit codes do not fill whole bytes; use "
            "more bits."
        )
    return channels * bits // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [..., D], each below 2**bits, into uint8 [..., D * bits / 8].

    Raises UserError if D is not a multiple of the 8 / bits codes that share a byte.
    """
    packed_bytes(codes.shape[-1], bits)
    planes = 8 // bits
    if bits == 8:
        return codes
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=codes.device).unsqueeze(-1)
    return (codes.unflatten(-1, (planes, codes.shape[-1] // planes)) << shifts).sum(-2, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `pack`: contiguous uint8 [..., D * bits / 8] to uint8 codes [..., D]."""
    check_bits(bits)
    if bits == 8:
        return packed
    if packed.numel() == 0:
        return packed.new_empty(*packed.shape[:-1], packed.shape[-1] * 8 // bits)
    # Shifting a word moves bits across its bytes; the mask clears all of those.
    wide, shifts, mask = _words(bits, packed.shape[-1], packed.device)
    planes = packed.view(wide).unsqueeze(-2) >> shifts
    return planes.bitwise_and_(mask).view(torch.uint8).flatten(-2)
