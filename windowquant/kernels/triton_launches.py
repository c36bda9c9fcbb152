"""Launches that stand for what the Triton kernels meet, for compiling them ahead of time."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from windowquant.kernels.triton_attention import FP_KIND, row_block
from windowquant.kernels.triton_common import DTYPES, padded
from windowquant.kernels.triton_compile import Launch
from windowquant.kernels.triton_decode import attend_kernel, combine_kernel
from windowquant.kernels.triton_operators import scores_kernel, weighted_kernel
from windowquant.kernels.triton_quantize import quantize_channels_kernel, quantize_tokens_kernel, tile_shape
from windowquant.kernels.triton_similarity import means_kernel
from windowquant.kernels.triton_table import FLAT_TOKENS, Kind, SideKind
from windowquant.kernels.triton_unfused import dequantize_kernel

_WINDOW = 16  # tokens
_POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16"}
_SIZES = dict.fromkeys(("stored", "fp_tokens", "programs", "budget", "shares", "order_rows"), 33)
_PAPER = (4, 2)  # bits of the quantized windows of the paper's plans


def _kinds(bits: tuple[int, ...], groups: str, channels: int) -> tuple[Kind, ...]:
    tile = _WINDOW if groups == "channel" else FLAT_TOKENS
    align = {b: min(16, (channels * b // 8) & -(channels * b // 8)) for b in bits}
    sides = [SideKind(b, "none" if b == 16 else groups, False, align[b]) for b in bits]
    return tuple(Kind(side, side, tile) for side in sides)


def _values(channels: int, rows: int, bits: tuple[int, ...], dtype: torch.dtype, groups: str) -> dict[str, Any]:
    pointer, strides = _POINTERS[dtype], (64 * channels, 16 * channels, channels)
    return {
        **dict.fromkeys(("q", "fp_k", "fp_v", "fp"), pointer),
        **dict.fromkeys(("table", "first", "order"), "*i64"),
        **dict.fromkeys(
            ("largest_out", "total_out", "values_out", "largest_in", "total_in", "values_in", "p"), "*fp32"
        ),
        **dict.fromkeys(("q_strides", "k_strides", "v_strides", "fp_strides", "out_strides"), strides),
        **dict.fromkeys(("factor", "scaling"), "fp32"),
        **_SIZES,
        **dict.fromkeys(("heads", "group", "queries"), 7),
        "order_tokens": 1,
        "D": channels,
        "DP": padded(channels),
        "BLOCK": row_block(rows, channels),
        "KINDS": _kinds(bits, groups, channels),
        "FP_KIND": FP_KIND,
        "COMPUTE": DTYPES[dtype],
    }


def _attention(
    channels: int,
    rows: int = 7,
    bits: tuple[int, ...] = _PAPER,
    dtype: torch.dtype = torch.float16,
    groups: str = "channel",
    mask: str = "causal",
) -> Launch:
    values = _values(channels, rows, bits, dtype, groups)
    pointer = {"causal": values["q"], "bool": "*i1", "additive": values["q"]}[mask]
    strides = {"mask_rows": 0, "mask_queries": 0, "mask_columns": 1 if mask != "causal" else 0}
    words = [f"D {channels}, {values['BLOCK']} rows, {_words(bits)}, {str(dtype).removeprefix('torch.')}"]
    words += [f"{groups} scales"] * (groups != "channel") + [f"{mask} mask"] * (mask != "causal")
    return Launch(attend_kernel, ", ".join(words), {**values, "mask": pointer, **strides, "MASK": mask})


def _words(bits: tuple[int, ...]) -> str:
    return "INT" + "+".join(map(str, bits)) if bits else "16 bit only"


def _others(channels: int) -> Iterator[Launch]:
    """The kernels beside `attend_kernel`, at one head_dim."""
    values = _values(channels, 7, _PAPER, torch.float16, "channel")
    shape = f"D {channels}, 16 rows, {_words(_PAPER)}, float16"
    yield Launch(combine_kernel, f"D {channels}, float16", {**values, "BLOCK": 16, "out": "*fp16"})
    yield Launch(scores_kernel, shape, {**values, "out": "*fp32"})
    yield Launch(weighted_kernel, shape, {**values, "out": "*fp32"})
    for side in (0, 1):
        words = f"D {channels}, {_words(_PAPER)} of {'KV'[side]}, float16"
        yield Launch(dequantize_kernel, words, {**values, "out": "*fp16", "SIDE": side})


def _quantizer(channels: int, bits: int, size: int, granularity: str, zero_point: str = "integer") -> Launch:
    tile, width = tile_shape(size, channels, bits, granularity)
    values = {
        **dict.fromkeys(("x", "scale", "offset"), "*fp16"),
        "columns": "*i64",
        "codes": "*u8",
        "flaw": "*i32",
        "strides": (64 * channels, 16 * channels, channels),
        **dict.fromkeys(("heads", "windows"), 7),
        "size": size,
        "peak": "fp32",
        "D": channels,
        "BITS": bits,
        "TILE": tile,
        "BYTES": width,
        "WHOLE": size <= tile,
        "ZERO": zero_point,
        "HAS_PEAK": zero_point == "symmetric",
    }
    kernel = quantize_tokens_kernel if granularity == "token" else quantize_channels_kernel
    return Launch(kernel, f"D {channels}, INT{bits}, windows of {size}, {zero_point} zero point", values)


def _similarity(metric: str) -> Launch:
    sizes = {"over_tokens": 3584, "size": _WINDOW, "C": 3584, "TILE": _WINDOW, "CHUNK": 256}
    values = {"visual": "*fp16", "centroid": "*fp32", "out": "*fp32", **sizes, "METRIC": metric}
    return Launch(means_kernel, f"{sizes['C']} channels, windows of {_WINDOW}, {metric}", values)


def launches() -> Iterator[Launch]:
    """Every kernel at representative shapes: head_dim, rows that share a KV head, bits, dtype, granularity, mask."""
    yield replace(_attention(128), tuned=True)
    for bits in ((16, 8, 4, 2, 1), (2,), ()):
        yield _attention(128, bits=bits)
    yield _attention(128, dtype=torch.bfloat16)
    yield _attention(128, groups="token")
    yield _attention(128, mask="bool")
    for width in (8, 4, 2, 1):
        yield _quantizer(128, width, _WINDOW, "window_channel")
    yield _quantizer(128, 2, 196, "window_channel")
    yield _quantizer(128, 4, _WINDOW, "window_channel", "symmetric")
    for channels in (64, 128):
        yield _attention(channels, rows=7 * 512)
        yield _quantizer(channels, 2, _WINDOW, "token")
        yield from _others(channels)
    for channels in (32, 64, 80, 96, 256):
        yield _attention(channels)
    yield _quantizer(64, 2, _WINDOW, "window_channel")
    for metric in ("cosine", "pearson", "euclidean"):
        yield _similarity(metric)
