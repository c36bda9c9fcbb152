"""A call of `attend` as threads see it: an array of int64, its entries named here."""

from typing import Any

from windowquant.kernels.cpu.compiled import inlined
from windowquant.kernels.cpu.steps import ROW

NEXT_PART, DONE = 0, 1
"""Parts that threads have taken, and those they have done; 0 before."""
PARTS = 2
TABLE = 3
"""Address of `table.Table.rows`."""
SEGMENTS, TILES, TOKENS = 4, 5, 6
"""Rows of the table; tiles and tokens of a head in all."""
Q, SCALING = 7, 8
"""Address of the queries, float32 [B * H, ROWS, CHANNELS], and the bits of a float32 to multiply them with."""
ROWS, PADDED_ROWS, QUERIES = 9, 10, 11
"""Query rows of a head; up to a multiple of the rows at a time; query tokens: row r is of query r % QUERIES."""
ALL_HEADS, HEADS, CHANNELS = 12, 13, 14
"""B * H, H, D."""
BIAS, BIAS_STEP = 15, 16
"""Address of what is added to scores, float32 [QUERIES, TOKENS], and bytes to the next request's; 0: causal."""
SCALED, PIECES = 17, 18
"""Addresses of the queries as parts use them and of what parts have of heads, both float32 [B * H + PARTS,
PADDED_ROWS, CHANNEL_STRIDE]."""
WORK, OUT = 19, 20
"""Addresses of PARTS times WORKSPACE bytes, and of the result, float32 [B * H, ROWS, CHANNELS]."""
TILES_CONFIG = 21
"""Address of what tiles are to be like, 0 if products are not to be those of integers."""
SPREAD = 22
"""Address of the queries as `integer` takes them, and of their steps, in the way of SCALED."""
SIZE = 23


@inlined
def bound(job: Any, part: int) -> int:
    """First tile of a part."""
    return job[ALL_HEADS] * job[TILES] * part // job[PARTS]


@inlined
def piece(job: Any, head: int, part: int) -> int:
    """Bytes to what a part has of a head. Parts follow each other, so no two pieces have one sum of both."""
    return (head + part) * job[PADDED_ROWS] * ROW


@inlined
def part_of(job: Any, tile: int) -> int:
    """The part that a tile is in."""
    part = 0
    while bound(job, part + 1) <= tile:
        part += 1
    return part
