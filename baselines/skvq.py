"""SKVQ (https://arxiv.org/abs/2405.06219): channels grouped by range, clipped codes per token, a window in 16 bit."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.cache.streaming.clusters import ClusterCodec
from windowquant.cache.streaming.rules import Sliding
from windowquant.cache.streaming.track import Scheme
from windowquant.calibrate.clips import DrawnAttention, search_clips
from windowquant.calibrate.statistics import Statistics, load_statistics
from windowquant.core.plan import KVShape
from windowquant.errors import UserError
from windowquant.method import Status
from windowquant.streaming_method import Schemes, StreamingMethod

Clips = Literal["constant", "searched"]
_LEVELS = {1.5: 3, 2: 4, 4: 16, 8: 256}


@dataclass(frozen=True)
class Skvq(StreamingMethod):
    """The official method (cat538/SKVQ) as set for long texts: K2 V2, group 128, window 128, 5 sinks, FP8 scales.

    The channels of all KV heads of a layer are clustered by their calibrated range before RoPE (k-means over least and
    largest value, K and V apart); a token's channels of one cluster share scale and minimum. The first `sinks` and the
    newest `window` tokens stay exact; the token that leaves the window is coded before the attention of its step. All
    tokens are alike, of text as of the video.

    Deviations: really packed (there: simulated); channels keep their order and the cluster is looked up (there: they
    are gathered and scattered); three levels (1.5 bits) take 1.6 bits (there: 2); k-means is seeded, and the ranges are
    those on the model's own prompts (there: WikiText-2); padding is no token; M-RoPE positions are kept (there: plain
    ones); exact tokens are never rotated back and forth. Several tokens in one update are coded and read as if they
    came one at a time.

    k_bits, v_bits: 1.5, 2, 4 or 8. group: channels of a cluster on average; a layer with fewer has one cluster. clips:
    "constant" (official code: `clip` for every cluster) or "searched" (the paper, whose code does not do it, hence a
    variant: for each cluster the clip, 0.5 to 1, that keeps the output of attention closest, K and V apart, here among
    drawn tokens of the calibration prompts; see `windowquant.calibrate.clips`). pre_rope: code K as it was before RoPE.
    statistics: "calibrated" (the file beside the checkpoint) or a file of `windowquant.calibrate.statistics`.
    """

    k_bits: float = 2.0
    v_bits: float = 2.0
    group: int = 128
    window: int = 128
    sinks: int = 5
    clips: Clips = "constant"
    clip: float = 0.92
    pre_rope: bool = True
    fp8: bool = True
    statistics: str = "calibrated"

    name: ClassVar[str] = "skvq"
    declared: ClassVar[Status] = "official"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("clips", get_args(Clips))
        for field in ("k_bits", "v_bits"):
            if getattr(self, field) not in _LEVELS:
                raise UserError(f"{field} is {getattr(self, field)}; use one of {', '.join(map(str, _LEVELS))}.")
        if not 0 < self.clip <= 1:
            raise UserError(f"clip is {self.clip}; set it above 0 and to 1 at most.")
        if self.group < 1:
            raise UserError(f"group is {self.group}; set it to 1 or more.")
        for field in ("pre_rope", "fp8"):
            if not isinstance(getattr(self, field), bool):
                raise UserError(f"{field} is {getattr(self, field)!r}; set it to true or false.")
        self._rule()

    @property
    def status(self) -> Status:
        return "variant" if self.clips == "searched" else self.declared

    def stored(self) -> str:
        return replace(self, statistics="calibrated").described()

    @property
    def before_rope(self) -> bool:
        return self.pre_rope

    def schemes(self, model: PreTrainedModel, shape: KVShape) -> Schemes:
        """Raises UserError without statistics of this very model."""
        found, rule = self._statistics(model), self._rule()
        layers = [
            tuple(Scheme(self._codec(found, name, index, bits), rule) for name, bits in self._kinds())
            for index in range(len(found.tensors["value.low"]))
        ]
        return lambda layer: (layers[layer][0], layers[layer][1])

    def _kinds(self) -> tuple[tuple[str, float], tuple[str, float]]:
        return ("unrotated_key", self.k_bits), ("value", self.v_bits)

    def _rule(self) -> Sliding:
        return Sliding(self.window, self.sinks, before=True)

    def _statistics(self, model: PreTrainedModel) -> Statistics:
        return load_statistics(model, None if self.statistics == "calibrated" else self.statistics)

    def _codec(self, found: Statistics, name: str, layer: int, bits: float) -> ClusterCodec:
        low, high = (found.tensors[f"{name}.{end}"][layer].flatten() for end in ("low", "high"))
        members = clusters(low, high, max(1, len(low) // self.group))
        codec = ClusterCodec(members, torch.full((int(members.max()) + 1,), self.clip), _LEVELS[bits], self.fp8)
        if self.clips == "constant":
            return codec
        return searched(codec, found.drawn(layer), is_key=name != "value", pre_rope=self.pre_rope)


def clusters(low: Tensor, high: Tensor, count: int) -> Tensor:
    """Cluster of each channel by its range, low and high [C]: int64 [C], from 0 without gaps, `count` at most."""
    from sklearn.cluster import KMeans  # a slow import, and few methods need it

    points = torch.stack([low, high], 1).double().numpy()
    labels = KMeans(min(count, len(np.unique(points, axis=0))), n_init=10, random_state=0).fit(points).labels_
    return torch.from_numpy(np.unique(labels, return_inverse=True)[1]).long()


def searched(codec: ClusterCodec, drawn: DrawnAttention, is_key: bool, pre_rope: bool) -> ClusterCodec:
    """The codec with the clips that keep the output of attention among the drawn tokens closest."""

    def error(clips: Tensor) -> float:
        return output_error(replace(codec, clips=clips), drawn, is_key, pre_rope)

    return replace(codec, clips=search_clips(len(codec.sizes), error))


def output_error(codec: ClusterCodec, drawn: DrawnAttention, is_key: bool, pre_rope: bool) -> float:
    """Mean squared error of the attention's output if the drawn tokens' K (before RoPE or after) or V are coded."""
    x = drawn.value if not is_key else drawn.unrotated_key if pre_rope else drawn.key
    tokens = x.transpose(0, 1)[None]
    read = codec.decode(codec.encode(tokens, "drawn tokens"), tokens.shape[1])[0].transpose(0, 1)
    if not is_key:
        return drawn.value_error(read)
    return drawn.key_error(drawn.rotated(read) if pre_rope else read)
