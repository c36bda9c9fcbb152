"""Tiles of AMX: products of small matrices of bytes, in hardware, on processors that have it."""

import ctypes
import sys
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils

from windowquant.kernels.cpu.emit import I8, I64, Emitter

_NEEDED = ("amx-tile", "amx-int8")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64

CONFIGURATION = 64
"""Bytes of a configuration: how many rows, of how many bytes, each of the eight tiles has."""


@lru_cache
def available() -> bool:
    """Whether code may use tiles: the compiler knows that the processor has them, and the system lets the process."""
    if sys.platform != "linux" or not all(_features().get(name, False) for name in _NEEDED):
        return False
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)) == 0


def _features() -> dict[str, bool]:
    """What Numba compiles for: the host, unless its settings say otherwise."""
    chosen = numba.config.CPU_FEATURES
    if chosen is None and numba.config.CPU_NAME not in (None, "host"):
        return {}
    if chosen is None:
        return dict(llvm.get_host_cpu_features())
    return {word[1:]: word[0] == "+" for word in chosen.split(",") if word}


def configuration(tiles: dict[int, tuple[int, int]]) -> np.ndarray:
    """The configuration in which each of `tiles` has (rows, bytes of a row); at most 16 and 64."""
    out = np.zeros(CONFIGURATION, np.uint8)
    out[0] = 1  # the palette
    for tile, (rows, row_bytes) in tiles.items():
        out[16 + 2 * tile], out[48 + tile] = row_bytes, rows
    return out


class TileEmitter(Emitter):
    """Writes instructions on tiles, which are numbered 0 to 7."""

    def configure(self, address: Any) -> None:
        """Take a configuration over from memory; all tiles become zero."""
        self._intrinsic("ldtilecfg", self._pointer(address, I8, 0))

    def save_configuration(self, address: Any) -> None:
        """Write down the present one."""
        self._intrinsic("sttilecfg", self._pointer(address, I8, 0))

    def clear_tile(self, tile: int) -> None:
        self._intrinsic("tilezero", I8(tile))

    def load_tile(self, tile: int, address: Any, stride: int) -> None:
        """Rows `stride` bytes apart."""
        self._intrinsic("tileloadd64", I8(tile), self._pointer(address, I8, 0), I64(stride))

    def store_tile(self, tile: int, address: Any, stride: int) -> None:
        self._intrinsic("tilestored64", I8(tile), self._pointer(address, I8, 0), I64(stride))

    def add_tile_product(self, target: int, a: int, b: int) -> None:
        """target[m, n] (int32) += sum over k and j < 4 of a[m, 4 k + j] (int8) * b[k, 4 n + j] (uint8)."""
        self._intrinsic("tdpbsud", I8(target), I8(a), I8(b))

    def _intrinsic(self, name: str, *values: Any) -> None:
        kind = ir.FunctionType(ir.VoidType(), [value.type for value in values])
        self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, f"llvm.x86.{name}"), values)
