"""Codes per token in clusters of channels that may lie in any head and differ in size (SKVQ)."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from windowquant.core.packing import pack, unpack
from windowquant.core.quantizer import check_finite
from windowquant.core.trits import PER_BYTE, pack_trits, unpack_trits

_SMALLEST = 1e-5  # the official floor of scales
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0


@dataclass(frozen=True, eq=False)
class ClusterCodec:
    """Asymmetric codes of `levels` values; scale and minimum are shared by one token's channels of one cluster.

    A cluster's least and largest value are both multiplied by its clip, then the range between them is cut evenly.

    members: cluster of each channel, int64 [C], C = H * D channels in the model's order, head by head; clusters are
    numbered from 0 without gaps. clips: one for each cluster, float32 [clusters]. levels: 2**bits, or 3. fp8: scale
    and minimum are stored in 8 bits (E4M3, no scale of their own), else in the kv dtype; codes do not depend on it.
    """

    members: Tensor
    clips: Tensor
    levels: int
    fp8: bool

    @property
    def block(self) -> int:
        return 1

    @property
    def bits(self) -> int:
        """Bits of a code, a whole number: 2 for three levels, which take 1.6."""
        return (self.levels - 1).bit_length()

    @cached_property
    def sizes(self) -> list[int]:
        """Channels of each cluster."""
        return torch.bincount(self.members).tolist()

    @cached_property
    def _order(self) -> Tensor:
        return self.members.argsort(stable=True)

    def identity(self) -> bytes:
        numbers = torch.cat([self.members.double(), self.clips.double()]).numpy()
        return f"{self.levels} levels, fp8 {self.fp8}: ".encode() + numbers.tobytes()

    def token_bits(self, heads: int, head_dim: int) -> float:
        channels = heads * head_dim
        codes = 8 * -(-channels // PER_BYTE) if self.levels == 3 else self.bits * channels
        return codes + 2 * len(self.sizes) * (8 if self.fp8 else 16)

    def encode(self, x: Tensor, label: str) -> tuple[Tensor, ...]:
        check_finite(x, label)
        channels = x.transpose(1, 2).flatten(2)  # [B, t, C]
        clusters = channels[..., self._order.to(x.device)].split(self.sizes, dim=-1)
        clips = self.clips.to(x.device)
        low = (torch.stack([part.amin(-1) for part in clusters], -1) * clips).to(x.dtype)
        high = (torch.stack([part.amax(-1) for part in clusters], -1) * clips).to(x.dtype)
        scale = ((high - low) / (self.levels - 1)).clamp(min=_SMALLEST)
        members = self.members.to(x.device)
        codes = (channels - low[..., members]) / scale[..., members]
        codes = codes.clamp(0, self.levels - 1).round().to(torch.uint8)
        packed = pack_trits(codes) if self.levels == 3 else pack(codes, self.bits)
        return tuple(part.unsqueeze(1) for part in (packed, self._stored(scale), self._stored(low)))

    def _stored(self, x: Tensor) -> Tensor:
        return x.float().clamp(-_FP8_MAX, _FP8_MAX).to(_FP8) if self.fp8 else x

    def decode(self, parts: tuple[Tensor, ...], heads: int) -> Tensor:
        codes, scale, low = (part.squeeze(1) for part in parts)
        members = self.members.to(codes.device)
        contiguous, channels = codes.contiguous(), len(members)
        values = unpack_trits(contiguous, channels) if self.levels == 3 else unpack(contiguous, self.bits)
        flat = values.float() * scale.float()[..., members] + low.float()[..., members]
        return flat.unflatten(-1, (heads, -1)).transpose(1, 2)
