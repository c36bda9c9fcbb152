"""Windows of consecutive visual tokens (paper, equations 4 to 7)."""

import warnings

from torch import Tensor

from windowquant.errors import UserError


def window_count(visual_tokens: int, window_size: int) -> int:
    """Number of whole windows, floor(M / S), among `visual_tokens` (M) at `window_size` (S) tokens a window.

    The last M mod S tokens belong to no window and stay in 16 bit. A window larger than the visual span gives 0 windows
    and a warning, since then nothing is quantized. Raises UserError if S < 1.
    """
    if window_size < 1:
        raise UserError(f"window_size is {window_size}, but a window needs a token at least; set it to 1 or more.")
    count = visual_tokens // window_size
    if count == 0 and visual_tokens > 0:
        warnings.warn(
            f"window_size {window_size} is larger than the visual span of {visual_tokens} tokens: "
            "everything stays in 16 bit.",
            stacklevel=2,
        )
    return count


def split_windows(x: Tensor, window_size: int) -> Tensor:
    """View `x` [..., M, C] as its whole windows [..., W, S, C]; the tail of M mod S tokens is left out."""
    count = window_count(x.shape[-2], window_size)
    return x[..., : count * window_size, :].unflatten(-2, (count, window_size))
