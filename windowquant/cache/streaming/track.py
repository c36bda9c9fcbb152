"""K or V of a group of rows as tokens come in: exact sinks, coded tokens, and the exact newest ones."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windowquant.cache.kv_bytes import tensor_bytes
from windowquant.cache.streaming.buffer import TokenBuffer
from windowquant.cache.streaming.codecs import Codec
from windowquant.cache.streaming.rotation import Rotation
from windowquant.cache.streaming.rules import Rule
from windowquant.cache.streaming.store import CodedTokens, Held
from windowquant.kernels.piecewise import MixedTokens


@dataclass(frozen=True)
class Scheme:
    """How K or V is kept: the codec of what is coded, and the rule that says when."""

    codec: Codec
    rule: Rule


class Track:
    """K or V [B, H, length, D] of rows that have all seen the same number of tokens."""

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
            self._recent.drop(due)
        return exact

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
        self._coded.select(rows)
        self._rotation = None if self._rotation is None else self._rotation.select(rows)

    def predicted(self) -> float:
        """Bytes of all tokens in all rows by formula, without room."""
        rows, heads, _, head_dim = self._first.shape
        coded = self._coded.length * rows * self._coded.codec.token_bits(heads, head_dim) / 8
        return coded + (self.length - self._coded.length) * self.token_bytes

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

    @property
    def token_bytes(self) -> int:
        """Bytes of one exact token in all rows."""
        return self._recent.entry_bytes

    def held(self) -> Held:
        """Bytes by kind."""
        exact = tensor_bytes(self._first) + self._recent.length * self._recent.entry_bytes
        return self._coded.held() + Held(exact=exact, slack=self._recent.slack_bytes)
