"""One pass over the tokens of a packed layer for a few query rows at a time, with an online softmax.

Tiles of up to 32 tokens are numbered through all segments (`table`) and heads; a call works on a range of them, so that
threads share them evenly. What it has of a head at the end, a piece, is the output so far, not yet divided, with the
largest score and the sum of exponentials of each row; `steps.combined` joins the pieces of a head.

With X = scale * Q + shift per window and channel, q . K = (q * scale) . Q + q . shift and the sum of p V is
scale * (sum of p Q) + (sum of p) * shift; with a scale per token instead, it goes to the scores, and into p. So scales
are used once per tile, and no K or V is ever dequantized into memory: codes become floats in registers.

`rows` and `kv` say by their types what is compiled (`tiles`); the rest as in `steps`.
"""

from typing import Any

from windowquant.kernels.cpu import steps
from windowquant.kernels.cpu import table as t
from windowquant.kernels.cpu.compiled import compiled, inlined
from windowquant.kernels.cpu.emit import LANES
from windowquant.kernels.cpu.steps import DOTS, LOWEST, PLANES, QUERIES, ROW, SCORES, TOP, WEIGHTED
from windowquant.kernels.cpu.tiles import (
    CHUNK,
    TOKENS,
    add_dots,
    cleared,
    k_codes,
    k_values,
    put,
    scaled_queries,
    tile_sums,
    v_codes,
    v_values,
)


@inlined
def _score(
    rows: Any, kv: Any, block: Any, place: Any, count: int, q: int, channels: int, scores: int, work: int
) -> None:
    """Scores of a tile."""
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
    rows: Any, kv: Any, block: Any, place: Any, count: int, out: int, channels: int, probs: int, work: int
) -> None:
    """Add the values of a tile to the output."""
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
    segment: Any,
    batch: int,
    head: int,
    first: int,
    tiles: int,
    tokens: int,
    q: int,
    first_row: int,
    queries: int,
    channels: int,
    bias: int,
    out: int,
    work: int,
) -> None:
    """Add tiles of a segment, from its tile `first` on, to the output of len(rows) query rows of a head."""
    k, v, size, per_window = segment[t.K : t.V], segment[t.V :], segment[t.WINDOW], segment[t.WINDOW_TILES]
    for tile in range(tiles):
        window, token = (first + tile) // per_window, (first + tile) % per_window * TOKENS
        count, scores = min(TOKENS, size - token), work + SCORES + 4 * TOKENS * tile
        _score(rows, kv, k, (batch, head, window, token), count, q, channels, scores, work)
        stored = segment[t.FIRST_TOKEN] + window * size + token
        steps.mask(len(rows), first_row, stored, count, tokens, bias, queries, scores)
    steps.softmax(len(rows), tiles, out, work)
    for tile in range(tiles):
        window, token = (first + tile) // per_window, (first + tile) % per_window * TOKENS
        count, probs = min(TOKENS, size - token), work + SCORES + 4 * TOKENS * tile
        _add(rows, kv, v, (batch, head, window, token), count, out, channels, probs, work)


@compiled
def attend_range(
    rows: Any,
    kv: Any,
    table: Any,
    tokens: int,
    q: int,
    q_rows: int,
    queries: int,
    heads: int,
    channels: int,
    bias: int,
    bias_step: int,
    first: int,
    last: int,
    out: int,
    work: int,
) -> None:
    """Work on tiles `first` to `last`, counted through all heads of all requests; see the head of this file.

    rows, kv: as in `tiles`. table: `table.Table.rows`, of `tokens` tokens. q: float32 [B * H, q_rows, CHANNEL_STRIDE],
    scaled, zero behind `channels`; q_rows a multiple of len(rows), row r being query r % `queries`. bias: float32
    [queries, tokens], `bias_step` bytes on for each request, or 0 for causal. out: float32 [pieces, q_rows,
    CHANNEL_STRIDE], which get a row's output, largest score and sum of exponentials behind it. work:
    WORKSPACE bytes. All but the table are addresses, multiples of 64.
    """
    per_head = table[-1, t.FIRST_TILE] + table[-1, t.TILES]
    at = first
    while at < last:
        index, low = at // per_head, at % per_head
        high, batch = min(per_head, low + last - at), index // heads
        cleared(out, q_rows * ROW // 64)
        for row in range(q_rows):
            put(out + row * ROW + TOP, LOWEST)
        for number_of in range(len(table)):
            segment = table[number_of]
            tile, end = max(low, segment[t.FIRST_TILE]), min(high, segment[t.FIRST_TILE] + segment[t.TILES])
            while tile < end:
                tiles = min(CHUNK, end - tile)
                for row in range(0, q_rows, len(rows)):
                    _chunk(
                        rows,
                        kv,
                        segment,
                        batch,
                        index % heads,
                        tile - segment[t.FIRST_TILE],
                        tiles,
                        tokens,
                        q + ROW * (index * q_rows + row),
                        row,
                        queries,
                        channels,
                        bias + batch * bias_step,
                        out + ROW * row,
                        work,
                    )
                tile += tiles
        at += high - low
        out += ROW * q_rows
