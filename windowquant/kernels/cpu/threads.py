"""Running a C function on torch's own threads.

Threads of our own would share the cores with torch's, which stay awake for a while after each of its operations: an
attention between two matrix products took twice as long. So it runs in a parallel region of the OpenMP library that
torch computes with, which takes microseconds. What holds for torch's operations holds here: after a fork, the child
can use one thread only.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_ADDRESS = ctypes.c_void_p
_FUNCTION = ctypes.CFUNCTYPE(None, _ADDRESS)


@lru_cache
def _region() -> Any:
    """GOMP_parallel(function, its argument, threads, flags) of torch's OpenMP library, None if it has no such entry."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        region = ctypes.CDLL(str(library)).GOMP_parallel  # found in what torch is linked with
    except (OSError, AttributeError):
        return None
    region.argtypes, region.restype = (_ADDRESS, _ADDRESS, ctypes.c_uint, ctypes.c_uint), None
    return region


@lru_cache
def _callable(function: int) -> Any:
    return _FUNCTION(function)


def run(function: int, argument: int, threads: int) -> None:
    """Call the C function at address `function` with the address `argument` in each of up to `threads` threads."""
    if threads == 1:
        _callable(function)(argument)
        return
    region = _region()
    if region is not None:
        region(function, argument, threads, 0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_callable(function), [argument] * threads))
