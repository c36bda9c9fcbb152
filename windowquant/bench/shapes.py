"""Sizes of the models that are measured, and the mixes of bit-widths."""

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from windowquant.errors import UserError

WINDOW = 32
"""Tokens a window, the paper's default."""

VIDEO = 100 * 196
"""Visual tokens of the paper's videos: 100 frames of 196."""


@dataclass(frozen=True)
class TextShape:
    """Sizes of a language model: layers, hidden and intermediate channels, query and KV heads, vocabulary."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    family: str = "qwen2"

    @property
    def channels(self) -> int:
        """head_dim."""
        return self.hidden // self.heads

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    def config(self) -> PretrainedConfig:
        """Configuration of this size in the real transformers class."""
        sizes: dict[str, Any] = {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 2**18,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return LlamaConfig(**sizes) if self.family == "llama" else Qwen2Config(**sizes)


TEXT = {
    "llava_onevision_0_5b": TextShape(24, 896, 4864, 14, 2, 152000, tied=True),
    "llava_onevision_7b": TextShape(28, 3584, 18944, 28, 4, 152128),
    "qwen2_vl_7b": TextShape(28, 3584, 18944, 28, 4, 152064),
    "llava_1_5_7b": TextShape(32, 4096, 11008, 32, 32, 32064, family="llama"),
    "mini": TextShape(4, 192, 512, 6, 2, 538),
    "tiny": TextShape(2, 32, 64, 4, 2, 300, tied=True),
}
"""By name: the language models' published sizes; `mini` has those of the embedded stand-ins, `tiny` is for tests."""

MIXES: dict[str, dict[int, float]] = {
    "fp16": {16: 1.0},
    "int8": {8: 1.0},
    "int4": {4: 1.0},
    "int2": {2: 1.0},
    "paper": {16: 0.125, 4: 0.4375, 2: 0.4375},
}
"""Share of the windows at each bit-width.

`paper`: the sizes in the paper's Table 10 say that 7/8 of the windows are quantized; how these divide between INT4 and
INT2 it does not say, so they are halved here.
"""


def text_shape(name: str) -> TextShape:
    """The sizes called `name`; UserError, listing the known names, for another."""
    return _known("model shape", name, TEXT)


def mix(name: str) -> dict[int, float]:
    """The shares called `name`; UserError, listing the known names, for another."""
    return _known("mix of bit-widths", name, MIXES)


def mixed_bits(windows: int, name: str) -> tuple[int, ...]:
    """Bits of each window by a mix's shares, spread evenly along the video; the first one has the highest width."""
    shares, taken = mix(name), dict.fromkeys(mix(name), 0)
    bits = []
    for index in range(windows):
        behind = {width: share * (index + 1) - taken[width] for width, share in shares.items()}
        chosen = max(behind, key=lambda width: (behind[width], width)) if index else max(shares)
        taken[chosen] += 1
        bits.append(chosen)
    return tuple(bits)


def _known(kind: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise UserError(f"There is no {kind} '{name}': the known ones are {', '.join(known)}.")
    return known[name]
