"""Coded tokens that grow: packed codes and their metadata, decoded piece by piece."""

from dataclasses import dataclass

from torch import Tensor

from windowquant.cache.streaming.buffer import TokenBuffer
from windowquant.cache.streaming.codecs import Codec


@dataclass(frozen=True)
class Held:
    """Bytes held: codes, metadata, exact tokens, and memory that holds none of these."""

    codes: int = 0
    metadata: int = 0
    exact: int = 0
    slack: int = 0

    def __add__(self, other: "Held") -> "Held":
        return Held(
            self.codes + other.codes,
            self.metadata + other.metadata,
            self.exact + other.exact,
            self.slack + other.slack,
        )


class CodedTokens:
    """Tokens coded by `codec`, in order; only ever appended to."""

    def __init__(self, codec: Codec, label: str) -> None:
        self.codec, self.length = codec, 0
        self._label, self._heads = label, 0
        self._parts: list[TokenBuffer] = []

    def append(self, x: Tensor, expected: int = 0) -> None:
        """Code x [B, H, t, D], t a multiple of the codec's block, leaving room for `expected` tokens at the first call.

        Raises UserError for NaN or infinity.
        """
        parts = self.codec.encode(x, self._label)
        if not self._parts:
            self._heads = x.shape[1]
            self._parts = [TokenBuffer(part, part.shape[2] + expected // self.codec.block) for part in parts]
        for buffer, part in zip(self._parts, parts, strict=True):
            buffer.append(part)
        self.length += x.shape[2]

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens `start` to `stop`, decoded: float32 [B, H, stop - start, D]."""
        block = self.codec.block
        first, last = start // block, -(-stop // block)
        values = self.codec.decode(tuple(part.view(first, last) for part in self._parts), self._heads)
        return values[:, :, start - first * block : stop - first * block]

    def truncate(self, tokens: int) -> None:
        """Keep the first `tokens` only, a multiple of the codec's block."""
        self.length = tokens
        for part in self._parts:
            part.truncate(tokens // self.codec.block)

    def parts(self) -> tuple[Tensor, ...]:
        """Codes and metadata of all tokens, views [B, H', blocks, ...]; none before the first token."""
        return tuple(part.view() for part in self._parts)

    def restore(self, parts: tuple[Tensor, ...], heads: int) -> None:
        """Become what `parts` gave, of tokens of `heads` heads."""
        self._heads, self._parts = heads, [TokenBuffer.of(part) for part in parts]
        self.length = parts[0].shape[2] * self.codec.block if parts else 0

    def select(self, rows: Tensor) -> None:
        """Replace the batch by its `rows` (int64 [B'])."""
        for part in self._parts:
            part.select(rows)

    def held(self) -> Held:
        """Bytes by kind."""
        if not self._parts:
            return Held()
        codes, *metadata = (part.length * part.entry_bytes for part in self._parts)
        return Held(codes, sum(metadata), 0, sum(part.slack_bytes for part in self._parts))
