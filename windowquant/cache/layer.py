"""One layer of the packed cache, as transformers drives it."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windowquant.cache.arrange import Arrangement
from windowquant.cache.kv_bytes import KVBytes, tensor_bytes
from windowquant.cache.pack import StoredLayer, joined, pack_k, pack_v
from windowquant.cache.request import CacheRequest
from windowquant.cache.request_layer import RequestLayer
from windowquant.cache.view import PackedView
from windowquant.errors import UserError
from windowquant.timing import synchronize


@dataclass(frozen=True, eq=False)
class LayerState:
    """What a packed layer consists of.

    seen: columns so far. packed_at: columns when it was packed. ragged: some row has an empty slot. order: column of
    every token stored by then, int64 [B, T'], if a mask needed it. pack_s: seconds that packing took.
    """

    stored: StoredLayer
    seen: int
    packed_at: int
    ragged: bool
    order: Tensor | None
    pack_s: float


class PackedCacheLayer(RequestLayer):
    """K and V of one layer: full precision until all visual tokens are in, packed from then on.

    `update` answers with plain tensors while the prefill runs (attention there is exact) and with a `PackedView`
    afterwards. In between, `pack_if_ready` packs; it is called when the layer's attention is done with K and V, so
    that these can be let go of one after the other (or else by the next `update`). Positions keep their original count
    throughout, also for tokens that are no longer stored. Tokens that come in more rows than are packed (beams, several
    answers) have the packed rows repeated in place.
    """

    is_croppable = True

    def __init__(self, index: int, request: CacheRequest) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.index = index
        self.stored: StoredLayer | None = None
        self.pack_s = 0.0
        self._request = request
        self._seen = 0  # columns so far
        self._packed_at = 0  # columns when the layer was packed
        self._ragged = False
        self._order: Tensor | None = None  # made when a mask first needs it
        self._view: PackedView | None = None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to allocate ahead: what is stored depends on the plan."""
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Take in K and V [B, H, t, D] of the next t columns; see the class for what comes back."""
        self._request.check_usable()
        self.pack_if_ready()
        if self.stored is not None:
            view = self._append(self.stored, key_states, value_states)
            return view, view
        self.is_initialized = True
        if self._seen and self.keys is None:
            raise UserError(
                f"Layer {self.index} of the cache could not be packed; make a new cache with new_cache(inputs)."
            )
        self._seen += key_states.shape[2]
        if self.keys is not None and self.values is not None:  # a prefill in several pieces
            key_states = torch.cat([self.keys, key_states], dim=2)
            value_states = torch.cat([self.values, value_states], dim=2)
        self.keys, self.values = key_states, value_states
        return key_states, value_states

    def _append(self, stored: StoredLayer, k: Tensor, v: Tensor) -> PackedView:
        """Take in a packed layer's next columns; the view is the same object at every step."""
        if k.shape[0] != stored.kept.rows:
            self._match_rows(k.shape[0], stored.kept.rows)
        self._seen += k.shape[2]
        stored.kept.append(k.detach(), v.detach())
        if self._view is None:
            self._view = PackedView(stored, self.order, self._ragged, self._seen, self._request.attend)
        self._view.columns = self._seen
        return self._view

    def pack_if_ready(self) -> None:
        """Pack, and let go of the full-precision copy, once the visual tokens are in and the plan is known."""
        if self.keys is None or self.values is None or self._seen < self._request.prompt.visual_end:
            return
        if self._request.bits(self.index) is not None:
            self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        assert self.keys is not None and self.values is not None
        device = self.keys.device
        synchronize(device)
        start = time.perf_counter()
        length = self._request.prompt.length
        at = self._packed_at = min(self._seen, length)  # assisted decoding runs guesses along with the prompt
        arrangement, recipe = self._arrangement(self.keys.shape[0]), self._request.recipe
        self._ragged = arrangement.ragged
        later = self._later(at) if at < self._seen else None
        k = pack_k(self.keys, arrangement, recipe, self.index, length - at)
        self.keys = None  # gone before V is packed
        v = pack_v(self.values, arrangement, recipe, self.index, length - at)
        self.values = None
        self.stored = joined(k, v, arrangement)
        if later is not None:
            self.stored.kept.append(*later)
        synchronize(device)
        self.pack_s = time.perf_counter() - start

    def _later(self, start: int) -> tuple[Tensor, Tensor]:
        """K and V from column `start` on, copied."""
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, start:].detach().clone(), self.values[:, :, start:].detach().clone()

    def _arrangement(self, rows: int) -> Arrangement:
        return self._request.arrangement(self.index, self._packed_at, rows // self._request.prompt.batch)

    def _prefix_order(self) -> Tensor:
        """Column of every token stored when the layer was packed, [B, T']; kept once it was needed."""
        if self._order is None:
            kept = self._packed().kept.k
            self._order = self._arrangement(kept.shape[0]).order.to(kept.device, copy=True)
        return self._order

    def order(self) -> Tensor:
        """Column of every stored token, [B, T]: the packed prefix, then the columns that came later."""
        prefix = self._prefix_order()
        later = torch.arange(self._packed_at, self._seen, device=prefix.device)
        return torch.cat([prefix, later.expand(prefix.shape[0], -1)], dim=1)

    def count_written(self, columns: int) -> None:
        """Take in columns whose K and V were written into the room of the 16-bit buffers (`GrowingKV.reserve`)."""
        self._packed().kept.length += columns
        self._seen += columns

    def _packed(self) -> StoredLayer:
        if self.stored is None:
            raise UserError("The cache holds no complete prompt yet; run the prefill first.")
        return self.stored

    def rows(self) -> int:
        return self._packed().kept.rows

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` columns (0 or negative, as in transformers); not into the video."""
        if tokens_to_remove > 0:
            raise UserError("crop takes 0 or a negative number of tokens; pass -n to remove the last n.")
        if tokens_to_remove == 0:
            return
        target, stored, first = self._seen + tokens_to_remove, self.stored, self._request.prompt.visual_end
        if stored is None or target < first:
            raise UserError(
                f"The cache cannot be cropped to {target} tokens, for its first {first if stored else self._seen} hold "
                "the video as one; make a new cache instead."
            )
        # What follows the video is kept in 16 bit, in order, at the end: also the part that was there at packing.
        self._forget_prefix(max(0, self._packed_at - target), stored)
        self._seen = target
        stored.kept.truncate(stored.prefix + target - self._packed_at)

    def _forget_prefix(self, columns: int, stored: StoredLayer) -> None:
        """Take the last columns out of what counts as packed."""
        self._packed_at -= columns
        stored.prefix -= columns
        if self._order is not None and columns:
            self._order = self._order[:, :-columns].clone()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i becomes what row beam_idx[i] was (int64 [B'])."""
        stored = self._packed()
        self._order = self._prefix_order().index_select(0, beam_idx.to(stored.kept.k.device))
        stored.select(beam_idx)

    def state(self) -> LayerState:
        """The packed layer, to be kept or written; UserError before it is packed."""
        stored = self._packed()
        return LayerState(stored, self._seen, self._packed_at, self._ragged, self._order, self.pack_s)

    def restore(self, state: LayerState) -> None:
        """Become what `state` says."""
        self.is_initialized, self._view = True, None
        self.stored, self._order, self._ragged = state.stored, state.order, state.ragged
        self._seen, self._packed_at, self.pack_s = state.seen, state.packed_at, state.pack_s

    def nbytes(self) -> KVBytes:
        """Bytes held, by kind."""
        index = 0 if self._order is None else tensor_bytes(self._order)
        if self.stored is not None:
            return self.stored.nbytes() + KVBytes(index=index)
        return KVBytes(tail=tensor_bytes(*(x for x in (self.keys, self.values) if x is not None)))

    def token_elements(self) -> int:
        """Elements of K and V of one token in one row."""
        k, v = self._packed().kept.tensors()
        return k.shape[1] * (k.shape[3] + v.shape[3])
