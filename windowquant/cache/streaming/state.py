"""What a streaming cache consists of, to be kept or written."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Mark:
    """A moment that a track can be taken back to.

    length: tokens then. first: how many of them were sinks. coded: how many were coded.
    """

    length: int
    first: int
    coded: int

    @property
    def coded_end(self) -> int:
        """Position up to which tokens were coded, sinks being exact."""
        return self.first + self.coded


@dataclass(frozen=True, eq=False)
class TrackState:
    """K or V of some rows: sinks `first`, the newest tokens `recent` and those `kept` exact for `mark`, each
    [B, H, any, D] in the kv dtype; the `coded` tokens as their codec has them, codes first.
    """

    length: int
    first: Tensor
    coded: tuple[Tensor, ...]
    recent: Tensor
    mark: Mark | None
    kept: Tensor


@dataclass(frozen=True, eq=False)
class GroupState:
    """Rows with the same padding; see `streaming.layer.RowGroup`."""

    rows: tuple[int, ...]
    sources: tuple[int, ...]
    padding: int
    k: TrackState
    v: TrackState


@dataclass(frozen=True, eq=False)
class StreamState:
    """One layer.

    seen: columns so far. marked: columns when it was marked, if it was. pack_s: seconds that coding the prefill took.
    """

    groups: tuple[GroupState, ...]
    seen: int
    marked: int | None
    pack_s: float
