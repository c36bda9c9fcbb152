"""What is done to a tile around its inner products; for any number of query rows, so it is compiled once.

`block` is K or V of a segment, a slice of a row of `table`; `place` is (request, KV head, window, token in it);
`rows` is the number of query rows at a time. All else are addresses and counts. `work` is a thread's workspace.
"""

from typing import Any

import numpy as np

from windowquant.kernels.cpu import table as t
from windowquant.kernels.cpu.compiled import compiled
from windowquant.kernels.cpu.emit import LANES
from windowquant.kernels.cpu.integer import A_BYTES, B_BYTES, STEPS, SUMS_BYTES
from windowquant.kernels.cpu.kinds import CHANNEL_STRIDE, MAX_CHANNELS, TOKEN_STRIDE, TOKENS
from windowquant.kernels.cpu.primitives import (
    cleared,
    copied,
    exponentials,
    largest,
    multiplied,
    number,
    put,
    value,
    widened,
)

LOWEST = np.float32(-np.inf)
LOG2_E = np.float32(1.44269504)
TINY = np.float32(1e-30)
MASKED = np.float32(np.finfo(np.float32).min)  # not -inf: a query that sees nothing must not become NaN
ROWS = 8
"""Most query rows at a time."""

TOP, TOTAL = 4 * MAX_CHANNELS, 4 * (MAX_CHANNELS + 1)
"""Where behind the channels of an output row, in bytes, its largest score and its sum of exponentials are."""

ROW, SCORE_ROW = 4 * CHANNEL_STRIDE, 4 * TOKEN_STRIDE
"""Bytes from a row of queries or outputs to the next, and from a row of scores to the next."""

# Where in the workspace, in bytes, things are.
SCORES = 0
QUERIES = SCORES + ROWS * SCORE_ROW
PLANES = QUERIES + ROWS * ROW
SCALE = PLANES + ROWS * ROW
SHIFT = SCALE + ROW
DOTS = SHIFT + ROW
WEIGHTED = DOTS + 64
COPY = WEIGHTED + ROWS * SCORE_ROW
STEP = COPY + TOKENS * ROW
PER_STEP = STEP + 64
PARTS = PER_STEP + 64
A = PARTS + ROWS * 64
B = A + A_BYTES
SUMS = B + B_BYTES
WORKSPACE = SUMS + SUMS_BYTES
"""Bytes of workspace a thread needs."""


@compiled
def tile_rows(block: Any, place: Any, count: int, whole: bool, work: int) -> Any:
    """Address and stride of a tile's codes: in place, or copied where rows or (if `whole`) tokens are too few."""
    batch, head, window, token = place
    address = block[t.CODES] + batch * block[t.BATCH] + head * block[t.HEAD] + window * block[t.ONE_WINDOW]
    address += token * block[t.TOKEN]
    if not block[t.PADDED] and not (whole and count < TOKENS):
        return address, block[t.TOKEN]
    cleared(work + COPY, TOKENS * ROW // 64)
    copied(address, block[t.TOKEN], work + COPY, ROW, count, block[t.ROW_BYTES])
    return work + COPY, np.int64(ROW)


@compiled
def group_of(block: Any, place: Any) -> int:
    """Bytes from the first scale to that of a tile."""
    batch, head, window, token = place
    start = batch * block[t.SCALE_BATCH] + head * block[t.SCALE_HEAD] + window * block[t.SCALE_WINDOW]
    return start + token * block[t.SCALE_TOKEN]


@compiled
def _in_planes(block: Any, channel: int, channels: int) -> int:
    """Bytes from the first channel to another where planes are padded to whole blocks."""
    width = channels // block[t.PLANES]
    return 4 * (channel // width * block[t.BLOCKS] * LANES + channel % width)


@compiled
def scales_of(block: Any, kv: Any, place: Any, channels: int, work: int) -> Any:
    """Addresses of a window's scale, times what undoes the codes' powers of two, and shift, float32 in planes.

    With a scale per token, what is left: the powers of two, and the factor of the shift.
    """
    if block[t.TOKEN_GROUPS]:
        return block[t.FACTORS], block[t.SHIFT_FACTORS]
    group, blocks = group_of(block, place), block[t.PLANES] * block[t.BLOCKS]
    scale, shift = work + SCALE, work + SHIFT
    if channels == blocks * LANES:
        widened(kv, block[t.SCALE] + group, block[t.FACTORS], scale, blocks)
        widened(kv, block[t.SHIFT] + group, block[t.SHIFT_FACTORS], shift, blocks)
        return scale, shift
    cleared(scale, blocks)
    cleared(shift, blocks)
    for channel in range(channels):
        at, source = _in_planes(block, channel, channels), group + channel * kv.itemsize
        put(scale + at, value(kv, block[t.SCALE] + source) * number(block[t.FACTORS] + at))
        put(shift + at, value(kv, block[t.SHIFT] + source) * number(block[t.SHIFT_FACTORS] + at))
    return scale, shift


@compiled
def queries_in_planes(rows: int, block: Any, q: int, channels: int, work: int) -> int:
    """Address of the queries in the planes of the codes: where they are, or copied with zeros between the planes."""
    if channels == block[t.PLANES] * block[t.BLOCKS] * LANES:
        return q
    cleared(work + PLANES, rows * ROW // 64)
    for row in range(rows):
        for channel in range(channels):
            put(work + PLANES + row * ROW + _in_planes(block, channel, channels), number(q + row * ROW + 4 * channel))
    return work + PLANES


@compiled
def add_from_planes(rows: int, block: Any, channels: int, out: int, work: int) -> None:
    """Add outputs in planes, in the workspace, to the output."""
    for row in range(rows):
        for channel in range(channels):
            target = out + row * ROW + 4 * channel
            source = work + PLANES + row * ROW + _in_planes(block, channel, channels)
            put(target, number(target) + number(source))


@compiled
def scale_scores(rows: int, kv: Any, block: Any, group: int, count: int, scores: int, work: int) -> None:
    """Scores of a tile whose tokens have a scale each."""
    for token in range(count):
        at = group + token * block[t.SCALE_TOKEN]
        factor, shift = value(kv, block[t.SCALE] + at), value(kv, block[t.SHIFT] + at)
        for row in range(rows):
            score = scores + row * SCORE_ROW + 4 * token
            put(score, number(score) * factor + number(work + DOTS + 4 * row) * shift)


@compiled
def weight_probs(rows: int, kv: Any, block: Any, group: int, count: int, probs: int, work: int) -> None:
    """Probabilities of a tile times the scale of their token, and in DOTS their sums times its shift."""
    for row in range(rows):
        total = np.float32(0)
        for token in range(count):
            at, prob = group + token * block[t.SCALE_TOKEN], number(probs + row * SCORE_ROW + 4 * token)
            put(work + WEIGHTED + row * SCORE_ROW + 4 * token, prob * value(kv, block[t.SCALE] + at))
            total += prob * value(kv, block[t.SHIFT] + at)
        put(work + DOTS + 4 * row, total)


@compiled
def mask(rows: int, first: int, token: int, count: int, tokens: int, bias: int, queries: int, scores: int) -> None:
    """Mask a tile: columns without a token, and what `bias` or, without one, causality hides.

    first: the first of the rows, row r being query r % `queries`. token: the first of the tile, of `tokens`. Scores are
    logarithms to base 2.
    """
    if count == TOKENS and bias == 0 and token + count <= tokens - queries + 1:
        return
    for row in range(rows):
        score, query = scores + row * SCORE_ROW, (first + row) % queries
        for index in range(TOKENS):
            at = score + 4 * index
            if index >= count or (bias == 0 and token + index > tokens - queries + query):
                put(at, MASKED)
            elif bias:
                put(at, max(number(at) + LOG2_E * number(bias + 4 * (query * tokens + token + index)), MASKED))


@compiled
def softmax(rows: int, tiles: int, out: int, work: int) -> None:
    """Turn scores into exponentials, and take what there is of the output down to the new largest score.

    STEP and PER_STEP: what probabilities of a row are counted in where they are written as integers, and its inverse.
    """
    for row in range(rows):
        scores, own = work + SCORES + row * SCORE_ROW, out + row * ROW
        high, before = largest(scores, 2 * tiles), number(own + TOP)
        if high > before:
            multiplied(own, np.exp2(before - high), CHANNEL_STRIDE // LANES)
            put(own + TOP, high)
            before = high
        step = max(np.exp2(high - before), TINY) / np.float32(STEPS)
        put(work + STEP + 4 * row, step)
        put(work + PER_STEP + 4 * row, np.float32(1) / step)
        put(own + TOTAL, number(own + TOTAL) + exponentials(scores, before, 2 * tiles))
