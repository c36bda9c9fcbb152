"""One layer of the streaming cache, as transformers drives it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windowquant.cache.request_layer import RequestLayer
from windowquant.cache.streaming.rotation import Angles, Rotation
from windowquant.cache.streaming.state import GroupState, StreamState
from windowquant.cache.streaming.track import Scheme, Track
from windowquant.cache.streaming.view import GroupView, StreamView
from windowquant.core.quantizer import check_finite
from windowquant.errors import UserError
from windowquant.models.prompt import Prompt
from windowquant.timing import synchronize


@dataclass(eq=False)
class StreamRequest:
    """What the layers of one cache share; another prompt about the same video may take the place of `prompt`.

    padding: empty columns before each row's first token. schemes: how layer l keeps its K and its V. storage_dtype:
    of what is not coded, from the model's dtype. check_usable: raises UserError if the cache may not be used now.
    angles: where K is coded without its rotation, gives the rotation of positions, see `Rotation`.
    """

    prompt: Prompt
    padding: tuple[int, ...]
    schemes: Callable[[int], tuple[Scheme, Scheme]]
    storage_dtype: Callable[[torch.dtype], torch.dtype]
    check_usable: Callable[[], None]
    angles: Angles | None = None

    def rotation(self, sources: tuple[int, ...], padding: int) -> Rotation | None:
        """The rotations of some rows; None where K is coded with them."""
        return None if self.angles is None else Rotation(self.angles, self.prompt, sources, padding)


def left_padding(prompt: Prompt) -> tuple[int, ...]:
    """Padding columns of each row; UserError unless all of them come before the row's first token."""
    padding = tuple((~prompt.attended).sum(1).tolist())
    if not all(bool(row[n:].all()) for row, n in zip(prompt.attended, padding, strict=True)):
        raise UserError("attention_mask hides tokens after a row's first one; pad prompts on the left only.")
    return padding


@dataclass(eq=False)
class RowGroup:
    """Rows with the same padding, and so the same number of tokens: they turn tokens into codes at the same time.

    rows: their places in the batch. sources: the row of the prompt that each continues.
    """

    rows: tuple[int, ...]
    sources: tuple[int, ...]
    padding: int
    k: Track
    v: Track


class StreamingLayer(RequestLayer):
    """K and V of one layer: full precision until all visual tokens are in, streamed from then on.

    `update` answers with plain tensors while the prefill runs (attention there is exact) and with a `StreamView`
    afterwards. An update of several tokens leaves the same state, and gives each of its queries the same K and V, as
    the same tokens one at a time.
    """

    is_croppable = False  # what was coded is no longer there in 16 bit

    def __init__(self, index: int, request: StreamRequest) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.index, self.pack_s = index, 0.0
        self.groups: list[RowGroup] = []
        self._request = request
        self._seen = 0
        self.marked: int | None = None  # columns when the layer was marked

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate ahead."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take in K and V [B, H, t, D] of the next t columns; see the class for what comes back."""
        self._request.check_usable()
        self.is_initialized = True
        if self.groups:
            self._match_rows(key_states.shape[0], self.rows())
        self._seen += key_states.shape[2]
        if self.groups:
            view = self._append(key_states.detach(), value_states.detach())
            return view, view
        if self.keys is not None and self.values is not None:  # a prefill in several pieces
            key_states = torch.cat([self.keys, key_states], dim=2)
            value_states = torch.cat([self.values, value_states], dim=2)
        self.keys, self.values = key_states, value_states
        if self._seen >= max(self._request.prompt.visual_end, *self._request.padding):
            self._start(key_states.detach(), value_states.detach())
        return key_states, value_states

    @torch.no_grad()
    def _start(self, k: Tensor, v: Tensor) -> None:
        """Code what the prefill leaves to be coded, and let go of the full-precision copy."""
        synchronize(k.device)
        start = time.perf_counter()
        dtype = self._request.storage_dtype(k.dtype)
        k, v = k.to(dtype), v.to(dtype)
        times = k.shape[0] // self._request.prompt.batch
        padding = torch.tensor(self._request.padding).repeat_interleave(times)
        for columns in padding.unique().tolist():
            rows = (padding == columns).nonzero().flatten()
            sources = tuple((rows // times).tolist())
            rotation = self._request.rotation(sources, columns)
            tracks = self._tracks(_columns(k, rows, columns), _columns(v, rows, columns), rotation)
            self.groups.append(RowGroup(tuple(rows.tolist()), sources, columns, *tracks))
        self.keys = self.values = None
        synchronize(k.device)
        self.pack_s = time.perf_counter() - start

    def _tracks(self, k: Tensor, v: Tensor, rotation: Rotation | None) -> tuple[Track, Track]:
        """K and V of some rows, [B', H, t, D]."""
        labels = f"layer {self.index} K", f"layer {self.index} V"
        for x, label in ((k, labels[0]), (v, labels[1])):
            check_finite(x, label)
        expected = max(0, self._request.prompt.length - self._seen)
        k_scheme, v_scheme = self._request.schemes(self.index)
        return Track(k_scheme, k, labels[0], expected, rotation), Track(v_scheme, v, labels[1], expected)

    def mark(self) -> None:
        """Make `go_back` come back to this moment; the prefill must be complete."""
        for group in self._started():
            group.k.mark()
            group.v.mark()
        self.marked = self._seen

    def go_back(self) -> None:
        """Become what it was when it was marked."""
        assert self.marked is not None
        for group in self._started():
            group.k.go_back()
            group.v.go_back()
        self._seen = self.marked

    def state(self) -> StreamState:
        """The layer's content, to be kept or written; UserError before the prefill is complete."""
        groups = tuple(
            GroupState(group.rows, group.sources, group.padding, group.k.state(), group.v.state())
            for group in self._started()
        )
        return StreamState(groups, self._seen, self.marked, self.pack_s)

    def restore(self, state: StreamState) -> None:
        """Become what `state` says."""
        self.is_initialized = True
        self.groups = [self._restored(group) for group in state.groups]
        self._seen, self.marked, self.pack_s = state.seen, state.marked, state.pack_s

    def _restored(self, state: GroupState) -> RowGroup:
        rotation = self._request.rotation(state.sources, state.padding)
        k, v = self._tracks(state.k.recent[:, :, :0], state.v.recent[:, :, :0], rotation)
        k.restore(state.k)
        v.restore(state.v)
        return RowGroup(state.rows, state.sources, state.padding, k, v)

    @torch.no_grad()
    def _append(self, k: Tensor, v: Tensor) -> StreamView:
        views = []
        for group in self.groups:
            rows = torch.tensor(group.rows, device=k.device)
            own_k, own_v = (x if len(rows) == len(x) else x.index_select(0, rows) for x in (k, v))
            views.append(GroupView(rows, group.padding, group.k.append(own_k), group.v.append(own_v)))
        return StreamView(tuple(views))

    def _started(self) -> list[RowGroup]:
        if not self.groups:
            raise UserError("The cache holds no complete prompt yet; run the prefill first.")
        return self.groups

    def rows(self) -> int:
        return sum(len(group.rows) for group in self._started())

    def sources(self) -> list[int]:
        """The row of the prompt that each row continues."""
        pairs = sorted(pair for group in self._started() for pair in zip(group.rows, group.sources, strict=True))
        return [source for _, source in pairs]

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise UserError("A streaming cache cannot be cropped, for it codes tokens as they age; make a new one.")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i becomes what row beam_idx[i] was (int64 [B'])."""
        wanted, kept = beam_idx.tolist(), []
        for group in self._started():
            rows = tuple(row for row, source in enumerate(wanted) if source in group.rows)
            if rows:
                own = [group.rows.index(wanted[row]) for row in rows]
                group.k.select(torch.tensor(own))
                group.v.select(torch.tensor(own))
                sources = tuple(group.sources[i] for i in own)
                kept.append(RowGroup(rows, sources, group.padding, group.k, group.v))
        self.groups = kept


def _columns(x: Tensor, rows: Tensor, start: int) -> Tensor:
    """Rows (ascending) of x [B, H, T, D] from column `start` on."""
    return (x if len(rows) == x.shape[0] else x.index_select(0, rows.to(x.device)))[:, :, start:]
