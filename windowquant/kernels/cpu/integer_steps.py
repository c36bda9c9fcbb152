"""What is done to a tile, or before the tiles of a segment, where products are those of integers (`integer`).

Arguments as in `steps`.
"""

import math
from typing import Any

import numpy as np

from windowquant.kernels.cpu import job as j
from windowquant.kernels.cpu import table as t
from windowquant.kernels.cpu.compiled import compiled
from windowquant.kernels.cpu.integer import CHUNK_CHANNELS, prob_bytes, query_bytes, spread_query
from windowquant.kernels.cpu.integer_tiles import add_values, k_products, scores_of, v_codes_as_bytes
from windowquant.kernels.cpu.primitives import number, put
from windowquant.kernels.cpu.steps import (
    DOTS,
    PARTS,
    PER_STEP,
    ROW,
    STEP,
    SUMS,
    TOP,
    A,
    B,
    group_of,
    tile_rows,
)

_ERROR = 5e-4
"""Error of scores, estimated, from which on queries are not written as integers."""


@compiled
def queries_spread(job: Any, block: Any, head: int, part: int) -> Any:
    """Address of a head's queries in steps for the tiles of a segment, and their steps; 0 if these are too coarse.

    A product with a scale is off by a third of a step or so, and a score by what comes of all channels.
    """
    channels, place = job[j.CHANNELS], j.piece(job, head, part)
    q, spread, largest = job[j.SCALED] + place, job[j.SPREAD] + place, block[t.LARGEST] + 4 * channels * head
    worst = np.float32(0)
    for row in range(job[j.PADDED_ROWS]):
        step = spread_query(q + ROW * row, largest, spread + ROW * row, channels // CHUNK_CHANNELS)
        put(spread + ROW * row + TOP, step)
        worst = max(worst, step)
    error = worst * ((1 << block[t.BITS]) - 1) * math.sqrt(channels) / 6
    return np.int64(spread) if error <= _ERROR else np.int64(0)


@compiled
def integer_scores(
    rows: int, kv: Any, block: Any, place: Any, count: int, spread: int, channels: int, scores: int, work: int
) -> None:
    """Scores of a tile."""
    address, stride = tile_rows(block, place, count, True, work)
    group, factor = group_of(block, place), number(block[t.SHIFT_FACTORS])
    scale, shift, chunks = block[t.SCALE] + group, block[t.SHIFT] + group, channels // CHUNK_CHANNELS
    query_bytes(kv, rows, spread, scale, shift, factor, work + A, work + PARTS, chunks)
    k_products(block[t.PLANES], address, stride, work + A, work + B, work + SUMS, block[t.BLOCKS], chunks)
    scores_of(rows, work + SUMS, spread + TOP, work + PARTS, scores)


@compiled
def add_integer_values(rows: int, kv: Any, block: Any, place: Any, count: int, out: int, probs: int, work: int) -> None:
    """Add the values of a tile to the output."""
    address, stride = tile_rows(block, place, count, True, work)
    group, factor = group_of(block, place), number(block[t.SHIFT_FACTORS])
    planes, blocks = block[t.PLANES], block[t.BLOCKS]
    prob_bytes(rows, probs, work + STEP, work + PER_STEP, work + DOTS, work + A)
    v_codes_as_bytes(planes, address, stride, work + B, blocks)
    add_values(
        kv,
        rows,
        work + A,
        work + B,
        work + SUMS,
        work + STEP,
        block[t.SCALE] + group,
        work + DOTS,
        block[t.SHIFT] + group,
        factor,
        out,
        planes * blocks,
    )
