"""One pass over the tokens of a packed layer for a few query rows at a time, with an online softmax.

Tiles of up to 32 tokens are numbered through all segments (`table`) and heads, and cut into parts of equal size, which
threads take one after the other (`job`). What a part has of a head, a piece, is the output so far, not yet divided,
with the largest score and the sum of exponentials of each row; `pieces` joins the pieces of a head.

With X = scale * Q + shift per window and channel, q . K = (q * scale) . Q + q . shift and the sum of p V is
scale * (sum of p Q) + (sum of p) * shift; with a scale per token instead, it goes to the scores, and into p. So scales
are used once per tile, and no K or V is ever dequantized into memory: codes become floats in registers.

`rows` and `kv` say by their types what is compiled (`tiles`); the rest as in `steps`.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import carray

from windowquant.kernels.cpu import job as j
from windowquant.kernels.cpu import steps
from windowquant.kernels.cpu import table as t
from windowquant.kernels.cpu.amx import available
from windowquant.kernels.cpu.compiled import compiled_for_c, inlined
from windowquant.kernels.cpu.emit import LANES
from windowquant.kernels.cpu.integer import tiles_begun, tiles_ended
from windowquant.kernels.cpu.integer_steps import add_integer_values, integer_scores, queries_spread
from windowquant.kernels.cpu.kinds import CHUNK, TOKENS
from windowquant.kernels.cpu.pieces import begin, combine
from windowquant.kernels.cpu.primitives import cleared, pointer, taken
from windowquant.kernels.cpu.steps import DOTS, PLANES, QUERIES, ROW, SCORES, WEIGHTED, WORKSPACE
from windowquant.kernels.cpu.tiles import add_dots, k_codes, k_values, scaled_queries, tile_sums, v_codes, v_values

TILES = available()
"""Whether code with products by integers is compiled at all; where it is used, the job and the table say."""


@inlined
def _tile_at(segment: Any, tile: int, tokens: int) -> Any:
    """Window of a tile of a segment, its first token in the window, and in the layer, and how many it has."""
    size, per_window, window, token = segment[t.WINDOW], segment[t.WINDOW_TILES], tile, 0
    if per_window > 1:
        window, token = tile // per_window, tile % per_window * TOKENS
    stored = segment[t.FIRST_TOKEN] + window * size + token
    return window, token, stored, min(TOKENS, size - token, tokens - stored)


@inlined
def _score(
    rows: Any, kv: Any, block: Any, place: Any, count: int, q: int, spread: int, channels: int, scores: int, work: int
) -> None:
    """Scores of a tile; spread: 0 if its products cannot be those of integers."""
    if TILES and spread:
        integer_scores(len(rows), kv, block, place, count, spread, channels, scores, work)
        return
    address, stride = steps.tile_rows(block, place, count, True, work)
    planes, blocks, size = block[t.PLANES], block[t.BLOCKS], len(rows)
    if block[t.BITS] == 16:
        k_values(rows, kv, address, stride, q, scores, blocks)
        return
    scale, shift = steps.scales_of(block, kv, place, channels, work)
    queries = steps.queries_in_planes(size, block, q, channels, work)
    scaled_queries(rows, queries, scale, shift, work + QUERIES, work + DOTS, planes * blocks)
    k_codes(rows, address, stride, work + QUERIES, scores, planes, blocks, block[t.BITS])
    if block[t.TOKEN_GROUPS]:
        steps.scale_scores(size, kv, block, steps.group_of(block, place), count, scores, work)
    else:
        add_dots(rows, scores, work + DOTS)


@inlined
def _add(
    rows: Any,
    kv: Any,
    integers: int,
    block: Any,
    place: Any,
    count: int,
    out: int,
    channels: int,
    probs: int,
    work: int,
) -> None:
    """Add the values of a tile to the output."""
    if TILES and integers and block[t.INTEGERS]:
        add_integer_values(len(rows), kv, block, place, count, out, probs, work)
        return
    address, stride = steps.tile_rows(block, place, count, False, work)
    planes, blocks, size = block[t.PLANES], block[t.BLOCKS], len(rows)
    if block[t.BITS] == 16:
        v_values(rows, kv, address, stride, count, probs, out, blocks)
        return
    scale, shift = steps.scales_of(block, kv, place, channels, work)
    if block[t.TOKEN_GROUPS]:
        steps.weight_probs(size, kv, block, steps.group_of(block, place), count, probs, work)
        probs = work + WEIGHTED
    else:
        tile_sums(rows, probs, work + DOTS)
    padded = channels != planes * blocks * LANES
    target = work + PLANES if padded else out
    if padded:
        cleared(target, size * ROW // 64)
    v_codes(rows, address, stride, count, probs, scale, work + DOTS, shift, target, planes, blocks, block[t.BITS])
    if padded:
        steps.add_from_planes(size, block, channels, out, work)


@inlined
def _chunk(
    rows: Any,
    kv: Any,
    integers: int,
    segment: Any,
    batch: int,
    head: int,
    first: int,
    tiles: int,
    tokens: int,
    q: int,
    spread: int,
    first_row: int,
    queries: int,
    channels: int,
    bias: int,
    out: int,
    work: int,
) -> None:
    """Add tiles of a segment, from its tile `first` on, to the output of len(rows) query rows of a head."""
    k, v = segment[t.K : t.V], segment[t.V :]
    for tile in range(tiles):
        window, token, stored, count = _tile_at(segment, first + tile, tokens)
        scores = work + SCORES + 4 * TOKENS * tile
        _score(rows, kv, k, (batch, head, window, token), count, q, spread, channels, scores, work)
        steps.mask(len(rows), first_row, stored, count, tokens, bias, queries, scores)
    steps.softmax(len(rows), tiles, out, work)
    for tile in range(tiles):
        window, token, _, count = _tile_at(segment, first + tile, tokens)
        probs = work + SCORES + 4 * TOKENS * tile
        _add(rows, kv, integers, v, (batch, head, window, token), count, out, channels, probs, work)


@inlined
def _part(rows: Any, kv: Any, job: Any, part: int) -> None:
    """Work on the tiles of a part, counted through all heads of all requests."""
    table = carray(pointer(job[j.TABLE]), (job[j.SEGMENTS], t.COLUMNS))
    per_head, padded, work = job[j.TILES], job[j.PADDED_ROWS], job[j.WORK] + part * WORKSPACE
    at, last = j.bound(job, part), j.bound(job, part + 1)
    while at < last:
        index, low = at // per_head, at % per_head
        high, batch, piece = min(per_head, low + last - at), index // job[j.HEADS], j.piece(job, index, part)
        begin(job, index, part)
        for segment_index in range(len(table)):
            segment = table[segment_index]
            tile, end = max(low, segment[t.FIRST_TILE]), min(high, segment[t.FIRST_TILE] + segment[t.TILES])
            spread = np.int64(0)
            if TILES and job[j.TILES_CONFIG] and tile < end and segment[t.K + t.INTEGERS]:
                spread = queries_spread(job, segment[t.K : t.V], index, part)
            while tile < end:
                tiles = min(CHUNK, end - tile)
                for row in range(0, padded, len(rows)):
                    _chunk(
                        rows,
                        kv,
                        job[j.TILES_CONFIG],
                        segment,
                        batch,
                        index % job[j.HEADS],
                        tile - segment[t.FIRST_TILE],
                        tiles,
                        job[j.TOKENS],
                        job[j.SCALED] + piece + ROW * row,
                        spread + ROW * row if spread else spread,
                        row,
                        job[j.QUERIES],
                        job[j.CHANNELS],
                        job[j.BIAS] + batch * job[j.BIAS_STEP],
                        job[j.PIECES] + piece + ROW * row,
                        work,
                    )
                tile += tiles
        at += high - low


@lru_cache
def attend_parts(rows: int, kv: type[np.generic]) -> Any:
    """A C function that takes the address of a job (`job`) and works on its parts until none is left.

    Several threads may call it with one job. rows: query rows at a time. kv: uint16 for float16, int16 for bfloat16,
    or float32. Compiled here, or read from disk.
    """
    sized, kind = (0,) * rows, np.empty(0, kv)

    def attend(address: Any) -> None:
        job = carray(address, j.SIZE, np.int64)
        before = np.int64(0)
        if TILES and job[j.TILES_CONFIG]:
            before = tiles_begun(job[j.TILES_CONFIG])
        part = taken(address, j.NEXT_PART)
        while part < job[j.PARTS]:
            _part(sized, kind, job, part)
            if taken(address, j.DONE) == job[j.PARTS] - 1:
                combine(job)
            part = taken(address, j.NEXT_PART)
        if TILES and job[j.TILES_CONFIG]:
            tiles_ended(before)

    return compiled_for_c(attend)
