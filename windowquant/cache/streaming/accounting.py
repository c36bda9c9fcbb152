"""What a streamed layer holds, by kind of byte and by kind of token."""

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import Tensor

from windowquant.cache.kv_bytes import KVBytes
from windowquant.cache.streaming.layer import RowGroup
from windowquant.cache.streaming.track import Track
from windowquant.models.prompt import Prompt


def _tracks(groups: Iterable[RowGroup], prompt: Prompt) -> Iterator[tuple[Track, Tensor]]:
    """Every track with which of its tokens are visual, bool [B', t]; tokens after the prompt's end are not."""
    for group in groups:
        visual = prompt.visual[list(group.sources), group.padding :]
        yield group.k, visual
        yield group.v, visual


def _count(visual: Tensor, parts: Iterable[range]) -> int:
    """Visual tokens (of all rows) at these positions."""
    return sum(int(visual[:, part.start : part.stop].sum()) for part in parts)


def _exact(track: Track, visual: Tensor) -> int:
    """Visual tokens (of all rows) that are exact."""
    return _count(visual, track.exact_positions())


def held_bytes(groups: Iterable[RowGroup], prompt: Prompt) -> KVBytes:
    """Bytes held; visual tokens in 16 bit are `fp16_windows`, others `tail`, beside their codes or without any."""
    total = KVBytes()
    for track, visual in _tracks(groups, prompt):
        held = track.held()
        exact = _exact(track, visual) + _count(visual, [track.kept_positions()])
        plain = exact * track.token_bytes // len(visual)
        total += KVBytes(held.codes, held.metadata, plain, held.exact - plain, held.slack)
    return total


def visual_bytes(groups: Iterable[RowGroup], prompt: Prompt) -> float:
    """Bytes held for visual tokens: the exact ones, their part of all codes and metadata, what a mark keeps exact."""
    total = 0.0
    for track, visual in _tracks(groups, prompt):
        held, exact = track.held(), _exact(track, visual)
        total += (exact + _count(visual, [track.kept_positions()])) * track.token_bytes / len(visual)
        coded = int(visual.sum()) - exact
        if coded:
            total += coded * (held.codes + held.metadata) / (track.coded * len(visual))
    return total


def visual_widths(groups: Iterable[RowGroup], prompt: Prompt) -> Counter[int]:
    """How many visual tokens (of all rows, of K and of V) have codes of which bit-width; 16 for exact ones."""
    tokens = Counter[int]()
    for track, visual in _tracks(groups, prompt):
        exact = _exact(track, visual)
        tokens[16] += exact
        tokens[track.code_bits] += int(visual.sum()) - exact
    return tokens
