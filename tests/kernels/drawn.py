"""Packed layers of any kind with queries and a mask, drawn by hypothesis for every backend."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.build import Case, Shape, build
from windowquant.core.quantizer import Granularity, ZeroPoint

WIDTHS = st.sampled_from([16, 8, 4, 2, 1])


@dataclass(frozen=True)
class Drawn:
    """What a case is made from. bits: of K and of V, a pair for each window. count: queries."""

    shape: Shape
    bits: list[tuple[int, int]]
    in_place: bool
    granularity: Granularity
    zero_point: ZeroPoint
    dtype: torch.dtype
    count: int
    masked: bool
    seed: int

    def made(self) -> tuple[Case, Tensor | None]:
        """The case, and a random mask of its original columns, or None.

        The mask finds its tokens only if the stored order is followed. Every query sees the last column.
        """
        k_bits, v_bits = [k for k, _ in self.bits], [v for _, v in self.bits]
        kinds = self.granularity, self.zero_point, self.dtype, self.seed
        case = build(self.shape, k_bits, *kinds, v_bits=v_bits, in_place=self.in_place)
        if not self.masked:
            return case, None
        size, generator = (self.shape.batch, 1, self.count, case.k.shape[2]), torch.Generator().manual_seed(self.seed)
        mask = torch.rand(size, generator=generator) > 0.4
        mask[..., -1] = True
        return case, mask


def drawn(
    windows: int,
    sizes: st.SearchStrategy[int],
    channels: Sequence[int],
    tail: st.SearchStrategy[int],
    count: int,
    dtypes: Sequence[torch.dtype],
    masked: st.SearchStrategy[bool],
    heads: int = 3,
) -> st.SearchStrategy[Drawn]:
    """Cases of at most so many windows, KV heads and queries; sizes: tokens a window. A mask-free one needs a tail of
    as many tokens as queries."""
    shapes = st.builds(
        Shape,
        batch=st.integers(1, 2),
        heads=st.integers(1, heads),
        group=st.sampled_from([1, 2, 7]),
        channels=st.sampled_from(channels),
        window=sizes,
        tail=tail,
    )
    return st.builds(
        Drawn,
        shape=shapes,
        bits=st.lists(st.tuples(WIDTHS, WIDTHS), max_size=windows),
        in_place=st.booleans(),
        granularity=st.sampled_from(get_args(Granularity)),
        zero_point=st.sampled_from(["integer", "float"]),
        dtype=st.sampled_from(dtypes),
        count=st.integers(1, count),
        masked=masked,
        seed=st.integers(0, 2**31),
    )
