"""KIVI (https://arxiv.org/abs/2402.02750): keys per channel, values per token, the newest tokens in 16 bit."""

from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedModel

from windowquant.cache.streaming.codecs import GroupCodec, check_group
from windowquant.cache.streaming.rules import Blocks, Sliding
from windowquant.cache.streaming.track import Scheme
from windowquant.core.packing import check_bits
from windowquant.core.plan import KVShape
from windowquant.errors import UserError
from windowquant.method import Status
from windowquant.streaming_method import Schemes, StreamingMethod


@dataclass(frozen=True)
class Kivi(StreamingMethod):
    """The official schedule and arithmetic (jy-yuan/KIVI), with the settings of the paper's main tables.

    A group of K is `group` consecutive tokens of one channel of one head; a group of V is `group` consecutive channels
    of one token of one head. Scale and minimum are in the kv dtype. Of n tokens, K keeps the newest n mod `residual`
    exact and V the newest `residual`: K is coded a whole block of `residual` at once, V token by token, each after the
    attention of the step that makes it due. All tokens are alike, of text as of the video.

    Deviations: a constant group is exact (there: 0 / 0); padding is left out of the groups (there: it takes part), so
    that a row does not depend on its batch; bfloat16 works and codes are computed in float32 (there: float16 only).
    Several tokens in one update, which the official code does not know after the prefill, are coded and read as if they
    came one at a time: so is the question under the `context` protocol.

    k_bits, v_bits: 8, 4, 2 or 1 (official kernels: 4 and 2). Raises UserError where `group` does not divide `residual`,
    where its codes do not fill whole bytes or, on binding, where it does not divide the model's head_dim.
    """

    k_bits: int = 2
    v_bits: int = 2
    group: int = 32
    residual: int = 128

    name: ClassVar[str] = "kivi"
    declared: ClassVar[Status] = "official"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bits(self.k_bits)
        check_bits(self.v_bits)
        if self.group < 1 or self.residual < 1 or self.residual % self.group:
            raise UserError(
                f"residual is {self.residual} and group {self.group}; set residual to a positive multiple of group."
            )
        if self.group * self.v_bits % 8:
            raise UserError(
                f"Groups of {self.group} codes of {self.v_bits} bits do not fill whole bytes; set group to a multiple "
                f"of {8 // self.v_bits}."
            )

    def schemes(self, model: PreTrainedModel, shape: KVShape) -> Schemes:
        check_group(self.group, shape.channels)
        k = Scheme(GroupCodec(self.k_bits, self.group, "channel"), Blocks(self.residual))
        v = Scheme(GroupCodec(self.v_bits, self.group, "token"), Sliding(self.residual))
        return lambda layer: (k, v)
