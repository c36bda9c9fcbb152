"""Codes of three values, packed five to a byte (3**5 = 243 <= 256): 1.6 bits a code."""

import torch
from torch import Tensor

from windowquant.errors import UserError

PER_BYTE = 5
_POWERS = (1, 3, 9, 27, 81)


def pack_trits(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., C], each 0, 1 or 2, into uint8 [..., ceil(C / 5)]; the first code counts least.

    Raises UserError for a code above 2.
    """
    if codes.numel() and int(codes.amax()) > 2:
        raise UserError("Codes of three values go from 0 to 2; these hold a larger one.")
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % PER_BYTE))
    digits = padded.unflatten(-1, (-1, PER_BYTE))
    return (digits * torch.tensor(_POWERS, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack_trits(packed: Tensor, length: int) -> Tensor:
    """Undo `pack_trits` for C = `length` codes: uint8 [..., C]."""
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) // powers % 3).flatten(-2)[..., :length]
