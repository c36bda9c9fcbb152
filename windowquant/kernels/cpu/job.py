"""A call of `attend` as threads see it: an array of int64, its entries named here."""

from typing import Any

from windowquant.kernels.cpu.compiled import inlined
from windowquant.kernels.cpu.steps import ROW

NEXT_PART = 0
"""Parts that threads have taken; must be 0, the first entry, before."""
PARTS = 1
TABLE = 2
"""Address of `table.Table.rows`."""
SEGMENTS, TILES, TOKENS = 3, 4, 5
"""Rows of the table, and what it holds, per head."""
Q = 6
"""Address of the queries, float32 [B * H, Q_ROWS, CHANNEL_STRIDE], scaled, zero behind the channels."""
Q_ROWS, QUERIES = 7, 8
"""A multiple of the rows at a time; query tokens: row r is of query r % QUERIES."""
ALL_HEADS, HEADS, CHANNELS = 9, 10, 11
"""B * H, H, D."""
BIAS, BIAS_STEP = 12, 13
"""Address of what is added to scores, float32 [QUERIES, TOKENS], and bytes to the next request's; 0: causal."""
PIECES, WORK = 14, 15
"""Addresses of B * H + PARTS pieces, float32 [Q_ROWS, CHANNEL_STRIDE], and of PARTS times WORKSPACE bytes."""
SIZE = 16


@inlined
def bound(job: Any, part: int) -> int:
    """First tile of a part."""
    return job[ALL_HEADS] * job[TILES] * part // job[PARTS]


@inlined
def piece(job: Any, head: int, part: int) -> int:
    """Address of what a part has of a head. Parts follow each other, so no two pieces have one sum of both."""
    return job[PIECES] + (head + part) * job[Q_ROWS] * ROW


@inlined
def part_of(job: Any, tile: int) -> int:
    """The part that a tile is in."""
    part = 0
    while bound(job, part + 1) <= tile:
        part += 1
    return part
