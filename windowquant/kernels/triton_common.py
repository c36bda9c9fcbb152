"""What the Triton kernels and their launchers share.

Under Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported) all of them run on CPU tensors, slowly:
for tests. It multiplies bfloat16 as if its bits were integers, and rounds to it wrongly, so products are taken in
float32 there, and `cast` rounds.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from windowquant.errors import UserError

INTERPRETED = bool(triton.knobs.runtime.interpret)

LOG2E = 1.4426950408889634
UNSPECIALIZED = (
    "stored",
    "fp_tokens",
    "queries",
    "group",
    "heads",
    "programs",
    "budget",
    "shares",
    "order_rows",
    "mask_rows",
    "mask_queries",
)
"""Kernel arguments that change from step to step or request to request; no kernel is compiled anew for them."""

_INTERPRETED = tl.constexpr(INTERPRETED)
NEVER = tl.constexpr(-1e30)  # score of a token that is not attended; finite, so that a query seeing nothing is no NaN

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


_SUMS = 64  # float32 sums of a tile that a thread holds at most, or other registers go to memory


def fitting(configs: list[triton.Config], arguments: dict[str, Any], **constants: Any) -> list[triton.Config]:
    """Those of `configs` with enough warps for a tile of BLOCK x DP sums, for `triton.autotune` to try."""
    least = constants["BLOCK"] * constants["DP"] // (32 * _SUMS)
    return configs if INTERPRETED else [config for config in configs if config.num_warps >= least]


PRUNE = {"early_config_prune": fitting}


def configs(*choices: tuple[int, int]) -> list[triton.Config]:
    """Configurations to tune over, from (warps, pipeline stages); the interpreter, where nothing differs, takes one.

    All registers are allowed, or the assembler may spill some so that more programs run side by side.
    """
    made = [triton.Config({}, num_warps=warps, num_stages=stages, maxnreg=255) for warps, stages in choices]
    return made[:1] if INTERPRETED else made


def compute_dtype(dtype: torch.dtype) -> Any:
    """The dtype in which queries of `dtype` are multiplied with K; sums are float32. UserError if there is none."""
    if dtype not in DTYPES:
        raise UserError(f"The Triton backend takes queries in float16, bfloat16 or float32, not {dtype}; convert them.")
    return tl.float32 if INTERPRETED and dtype == torch.bfloat16 else DTYPES[dtype]


def check_device(x: Tensor) -> None:
    """Raise UserError unless Triton can read `x`: on a CUDA device, or on the CPU under the interpreter."""
    if x.device.type != ("cpu" if INTERPRETED else "cuda"):
        raise UserError(
            f"The Triton backend was given tensors on {x.device}; move them to a CUDA device, or choose the backend "
            "'cpu' or 'reference' (TRITON_INTERPRET=1 runs the kernels on the CPU, for tests)."
        )


@lru_cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; 1 under the interpreter, whose programs run one by one."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def padded(size: int) -> int:
    """The next power of two, 16 at least: what a side of a tile must be."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """Finite float32 `x` in DTYPE, rounded to the nearest, to even in a tie."""
    if _INTERPRETED and DTYPE.is_bf16():
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        rounded = x.to(DTYPE)
    return rounded
