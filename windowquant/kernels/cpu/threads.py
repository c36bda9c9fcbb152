"""Running parts of a work on torch's own threads.

Threads of our own would share the cores with torch's, which stay awake for a while after each of its operations: an
attention between two matrix products took twice as long. So parts run in a parallel region of the OpenMP library that
torch computes with.
"""

import ctypes
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@lru_cache
def _region() -> Any:
    """GOMP_parallel(function, its argument, threads, flags) of torch's OpenMP library, None if it has no such entry."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return ctypes.CDLL(str(library)).GOMP_parallel  # found in what torch is linked with
    except (OSError, AttributeError):
        return None


def run_parts(parts: int, work: Callable[[int], None]) -> None:
    """Call work(0) to work(parts - 1), at once as far as they leave the GIL; raises what one of them raised."""
    if parts == 1:
        work(0)
        return
    region = _region()
    if region is None:
        with ThreadPoolExecutor(parts) as pool:
            list(pool.map(work, range(parts)))
        return
    left, errors = itertools.count(), []

    def body(_: Any) -> None:
        while (part := next(left)) < parts:  # a region may get fewer threads than it asks for
            try:
                work(part)
            except BaseException as error:
                errors.append(error)

    region(_Body(body), None, parts, 0)
    if errors:
        raise errors[0]
