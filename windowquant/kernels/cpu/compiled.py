"""Numba's compiler, with its results kept between processes."""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from platformdirs import user_cache_path

_OPTIONS = {"nogil": True, "error_model": "numpy"}


@lru_cache
def _folder() -> str | None:
    """Where compiled code is kept, None if nowhere can be written to.

    One folder for each state of the sources, all of them: Numba by itself looks at a function's own file only.
    $NUMBA_CACHE_DIR, if set, is where it is made.
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))))
    root = Path(numba.config.CACHE_DIR or user_cache_path("windowquant"))
    folder = root / f"numba-{digest.hexdigest()[:12]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(folder)


def compiled(function: Callable[..., Any]) -> Any:
    """Decorator: compile with Numba at the first call, without the GIL."""
    folder, before = _folder(), numba.config.CACHE_DIR
    if folder is None:
        return numba.njit(**_OPTIONS)(function)
    numba.config.CACHE_DIR = folder
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    finally:
        numba.config.CACHE_DIR = before


def inlined(function: Callable[..., Any]) -> Any:
    """Decorator: compile as a part of the functions that call it only, or it would be compiled several times."""
    return numba.njit(inline="always", **_OPTIONS)(function)
