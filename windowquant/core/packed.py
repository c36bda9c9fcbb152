"""What a packed layer of the cache consists of. Plain containers; the arithmetic is in `quantizer` and the kernels."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WindowBlock:
    """K or V of W windows of one bit-width, quantized as X = scale * Q + offset, or in 16 bit as it is.

    codes: uint8 [B, H, W, S, D * bits / 8], packed as `packing` says; with 16 bits the values themselves,
        [B, H, W, S, D] in the kv dtype.
    scale, offset: 16-bit kv dtype, broadcastable to [B, H, W, S, D]; their shape is that of the groups, for instance
        [B, H, W, 1, D] for "window_channel" (see `quantizer.Granularity`). With 16 bits both are empty, [B, 0]. The
        offset of symmetric codes follows from their scale and is not stored: it is empty too.
    bits: 16, 8, 4, 2 or 1.
    shape: (B, H, W, S, D) of the tensor it stands for.
    granularity: which elements share a scale and an offset.
    """

    codes: Tensor
    scale: Tensor
    offset: Tensor
    bits: int
    shape: tuple[int, int, int, int, int]
    granularity: str

    @property
    def symmetric(self) -> bool:
        """Whether the middle code stands for zero."""
        return self.bits < 16 and self.offset.ndim == 2

    def shift(self) -> Tensor:
        """The offset as float32, of the shape of the scale, whether it is stored or follows from the scale."""
        return -middle(self.bits) * self.scale.float() if self.symmetric else self.offset.float()


def middle(bits: int) -> int:
    """The code that stands for zero where codes are symmetric; as many lie on either side of it."""
    return 2 ** (bits - 1) - 1


@dataclass(frozen=True)
class Segment:
    """Windows that are stored together, in stored order; all their K has one bit-width, and all their V has one.

    windows: their original window indices; windows[i] is window i of both blocks. k, v: may differ in their bits.
    """

    k: WindowBlock
    v: WindowBlock
    windows: tuple[int, ...]


@dataclass(frozen=True)
class PackedLayer:
    """The K and V of one layer after packing.

    Stored order is: the tokens of each segment (window by window), then the tokens of `fp_k`. The 16-bit block comes
    last because it grows: appending a token then appends to `order`, and nothing else moves.

    fp_k, fp_v: [B, H, T16, D], everything kept in 16 bit, oldest first by the cache's own choice, but with the newest
        tokens at the end: FP16 windows, text tokens, tokens outside whole windows, then the tail of later tokens.
    segments: may be empty, and a segment may hold no window. All share S, D and the granularity (one of K, one of V).
        A reordered layer, as the paper has it, has one segment for each quantized bit-width, widest codes first; its
        16-bit windows are in `fp_k`. A layer whose windows stay in place has its runs of equal bit-width as segments,
        in the windows' order, those of 16 bits among them.
    order: int64 [B, T], T = sum over segments of W * S, plus T16. order[b, j] is the original position (column of the
        attention mask) of stored token j, or -1 for a slot that holds no token: requests of a batch may differ in their
        number of windows, and the shorter one has such slots. Slots must hold finite values; attention skips them.
        Without a mask and without slots, only the shape of `order` matters.
    """

    fp_k: Tensor
    fp_v: Tensor
    segments: tuple[Segment, ...]
    order: Tensor
