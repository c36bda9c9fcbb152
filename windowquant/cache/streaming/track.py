"""K or V of a group of rows as tokens come in: exact sinks, coded tokens, and the exact newest ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.cache.kv_bytes import tensor_bytes
from windowquant.cache.streaming.buffer import TokenBuffer
from windowquant.cache.streaming.codecs import Codec
from windowquant.cache.streaming.rotation import Rotation
from windowquant.cache.streaming.rules import Rule
from windowquant.cache.streaming.state import Mark, TrackState
from windowquant.cache.streaming.store import CodedTokens, Held
from windowquant.kernels.piecewise import MixedTokens


@dataclass(frozen=True)
class Scheme:
    """How K or V is kept: the codec of what is coded, and the rule that says when."""

    codec: Codec
    rule: Rule


class Track:
    """K or V [B, H, length, D] of rows that have all seen the same number of tokens.

    Codes are only ever appended. So a moment that was marked comes back exactly if the tokens that were exact then and
    were coded since are kept beside their codes: as many of them as the rule leaves exact, at most.
    """

    def __init__(self, scheme: Scheme, x: Tensor, label: str, expected: int, rotation: Rotation | None = None) -> None:
        """Start with the prefill, x [B, H, t, D] in the kv dtype; `expected`: how many more tokens are known to come.

        `label` names the layer and the tensor in errors. rotation: taken off what is coded; exact tokens keep it.
        """
        self._rule, self.length = scheme.rule, x.shape[2]
        end = self._rule.coded(self.length)
        self._first = x[:, :, : self._rule.sinks].clone()
        self._coded, self._rotation = CodedTokens(scheme.codec, label), rotation
        if end > self._first.shape[2]:
            self._code(x[:, :, self._first.shape[2] : end], expected)
        self._recent = TokenBuffer(x)
        self._recent.append(x[:, :, max(end, self._first.shape[2]) :])
        self._mark: Mark | None = None
        self._kept = TokenBuffer(x)  # exact at the mark, coded since

    @property
    def coded_end(self) -> int:
        """Position up to which tokens are coded, sinks being exact."""
        return self._first.shape[2] + self._coded.length

    def append(self, x: Tensor) -> MixedTokens:
        """Take in x [B, H, t, D]; what its queries read is valid until the next call.

        Raises UserError for NaN or infinity in what is coded now.
        """
        start, self.length = self.length, self.length + x.shape[2]
        self._keep(x.to(self._recent.view().dtype))
        boundaries = torch.tensor([self._rule.read_coded(position) for position in range(start, self.length)])
        exact = self._turn(int(boundaries[0]))
        return MixedTokens(self._first, exact, self._read, boundaries)

    def _keep(self, x: Tensor) -> None:
        missing = self._rule.sinks - self._first.shape[2]
        if missing > 0:
            self._first = torch.cat([self._first, x[:, :, :missing]], dim=2)
            x = x[:, :, missing:]
        self._recent.append(x)

    def _turn(self, read_from: int) -> Tensor:
        """Code what the rule says; the exact tokens from position `read_from` on, coded ones among them."""
        before, due = self.coded_end, self._rule.coded(self.length) - self.coded_end
        exact = self._recent.view(max(0, read_from - before))
        if due > 0:
            self._code(self._recent.view(0, due))
            if self._mark is not None and before < self._mark.length:
                self._kept.append(self._recent.view(0, min(due, self._mark.length - before)))
            self._recent.drop(due)
        return exact

    def mark(self) -> None:
        """Make `go_back` come back to this moment."""
        self._mark = Mark(self.length, self._first.shape[2], self._coded.length)
        self._kept = TokenBuffer(self._first)

    def go_back(self) -> None:
        """Become what it was when it was marked, in the rows it has now."""
        assert self._mark is not None
        left = self._recent.view(0, max(0, self._mark.length - self.coded_end))
        self._recent = TokenBuffer.of(torch.cat([self._kept.view(), left], dim=2))
        self._kept = TokenBuffer(self._first)
        if self._mark.first < self._first.shape[2]:
            self._first = self._first[:, :, : self._mark.first].clone()
        self._coded.truncate(self._mark.coded)
        self.length = self._mark.length

    def state(self) -> TrackState:
        """All it holds, without a copy."""
        recent, kept = self._recent.view(), self._kept.view()
        return TrackState(self.length, self._first, self._coded.parts(), recent, self._mark, kept)

    def restore(self, state: TrackState) -> None:
        """Become what `state` says; K or V of the same scheme and rotation."""
        self.length, self._first, self._mark = state.length, state.first, state.mark
        self._recent, self._kept = TokenBuffer.of(state.recent), TokenBuffer.of(state.kept)
        self._coded.restore(state.coded, state.first.shape[1])

    def _code(self, x: Tensor, expected: int = 0) -> None:
        """Code the next tokens, x [B, H, t, D]."""
        plain = x if self._rotation is None else self._rotation.undo(x, self.coded_end).to(x.dtype)
        self._coded.append(plain, expected)

    def _read(self, start: int, stop: int) -> Tensor:
        offset = self._first.shape[2]
        values = self._coded.read(start - offset, stop - offset)
        return values if self._rotation is None else self._rotation.redo(values, start)

    def select(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64 [B'])."""
        self._first = self._first.index_select(0, rows.to(self._first.device))
        self._recent.select(rows)
        self._kept.select(rows)
        self._coded.select(rows)
        self._rotation = None if self._rotation is None else self._rotation.select(rows)

    def predicted(self) -> float:
        """Bytes of all tokens in all rows by formula, without room."""
        rows, heads, _, head_dim = self._first.shape
        coded = self._coded.length * rows * self._coded.codec.token_bits(heads, head_dim) / 8
        return coded + (self.length - self._coded.length + self._kept.length) * self.token_bytes

    @property
    def token_elements(self) -> int:
        """Elements of one token in one row."""
        return self._first.shape[1] * self._first.shape[3]

    @property
    def coded(self) -> int:
        """Coded tokens of each row."""
        return self._coded.length

    @property
    def code_bits(self) -> int:
        """Bits of a code."""
        return self._coded.codec.bits

    def exact_positions(self) -> list[range]:
        """Positions of the exact tokens: sinks, and the newest ones."""
        return [range(self._first.shape[2]), range(self.coded_end, self.length)]

    def kept_positions(self) -> range:
        """Positions of the coded tokens that are held exact as well, for the marked moment."""
        start = 0 if self._mark is None else self._mark.coded_end
        return range(start, start + self._kept.length)

    @property
    def token_bytes(self) -> int:
        """Bytes of one exact token in all rows."""
        return self._recent.entry_bytes

    def held(self) -> Held:
        """Bytes by kind."""
        exact = tensor_bytes(self._first) + (self._recent.length + self._kept.length) * self._recent.entry_bytes
        return self._coded.held() + Held(exact=exact, slack=self._recent.slack_bytes + self._kept.slack_bytes)
