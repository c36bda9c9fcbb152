"""Numba's compiler, with its results kept between processes."""

import hashlib
import pickle
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


def _kept(compiler: Callable[..., Any]) -> Any:
    """What `compiler` makes, given whether to keep the result, with Numba's folder set to ours meanwhile."""
    folder, before = _folder(), numba.config.CACHE_DIR
    if folder is None:
        return compiler(False)
    numba.config.CACHE_DIR = folder
    try:
        return compiler(True)
    finally:
        numba.config.CACHE_DIR = before


def compiled(function: Callable[..., Any]) -> Any:
    """Decorator: compile with Numba at the first call, without the GIL."""
    return _kept(lambda keep: numba.njit(cache=keep, **_OPTIONS)(function))


def compiled_for_c(function: Callable[..., Any]) -> Any:
    """Compile now, as a C function that takes a void pointer: Numba's object, with `address` and `ctypes`."""
    signature = numba.types.void(numba.types.voidptr)

    def compiler(keep: bool) -> Any:
        return numba.cfunc(signature, cache=keep, error_model="numpy")(function)

    try:
        return _kept(compiler)
    except (EOFError, pickle.UnpicklingError):  # a full disk leaves half of what was to be kept
        _forget()
        return _kept(compiler)


def _forget() -> None:
    """Remove all compiled code that was kept for these sources."""
    folder = _folder()
    if folder is not None:
        for path in Path(folder).rglob("*.nb[ci]"):
            path.unlink(missing_ok=True)


def inlined(function: Callable[..., Any]) -> Any:
    """Decorator: compile as a part of the functions that call it only, or it would be compiled several times."""
    return numba.njit(inline="always", **_OPTIONS)(function)
