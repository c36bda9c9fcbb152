"""Answer one request under one of three protocols, timed, and score given answers against the same cache.

Which tokens read the packed cache decides what an accuracy can mean:

- `context` (default): prefill up to the last visual token, pack, then run the question against the packed cache.
- `paper`: prefill the whole prompt, pack; the first answer token comes from full precision.
- `cached`: prefill all but the last prompt token, pack, continue with that one.

Under each of them the plan is searched with the whole prompt's text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from windowquant.bound import Bound
from windowquant.cache.kv_bytes import KVBytes, kv_bytes, visual_bits
from windowquant.cache.request_cache import RequestCache
from windowquant.core.plan import BitPlan
from windowquant.errors import UserError
from windowquant.models import Prompt
from windowquant.prefill import first_columns
from windowquant.timing import timed

Protocol = Literal["context", "paper", "cached"]


@dataclass(frozen=True)
class Reply:
    """An answer, what it cost, and what the cache looked like at its end.

    tokens: the answer's ids, the stop token included if one came. stopped: whether one did.
    Seconds: search_s (text embeddings, scores, plan), pack_s (quantizing and packing all layers), prefill_s (the
    prefill pass without these two, but with the vision tower, unless its features were given), question_s (prompt
    tokens run after packing; 0 under `paper`), decode_s (one entry per further answer token).
    kv: bytes held at the end, by kind. kv_predicted: the same by formula, without room and index.
    bits: share of the visual tokens (mean over layers) at each bit-width, 0 for dropped ones; empty for a cache that is
    not ours. average_bits: bits held per element of K and V of the visual tokens, scales included; 16 or 32 where
    nothing is quantized, NaN for a prompt without visual tokens.
    """

    protocol: Protocol
    tokens: list[int]
    stopped: bool
    search_s: float
    pack_s: float
    prefill_s: float
    question_s: float
    decode_s: list[float]
    kv: KVBytes
    kv_predicted: int
    bits: dict[int, float]
    average_bits: float
    plan: BitPlan | None
    prompt_tokens: int
    visual_tokens: int


def answer(
    bound: Bound,
    inputs: Mapping[str, Any],
    protocol: Protocol = "context",
    max_new_tokens: int = 32,
    stop_ids: Iterable[int] | None = None,
) -> tuple[Reply, "Session"]:
    """Answer one request greedily; the tokens are those of `generate` with the same cache.

    inputs: processor outputs of one request (batch 1, no padding), on the model's device; with `visual_features` from
    `Bound.visual_features` in place of the pixels the vision tower is not run (nor timed). stop_ids: tokens that end
    the answer, by default the generation config's end-of-sequence ids. The session can then score other answers.
    Raises UserError for a batch, padding, an unknown protocol, or max_new_tokens below 1.
    """
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; set it to 1 or more.")
    session = Session(bound, inputs, protocol)
    stops = _stop_ids(bound, stop_ids)
    tokens, decode_s = [int(session.first_logits.argmax())], []
    while len(tokens) < max_new_tokens and tokens[-1] not in stops:
        token, seconds = timed(bound.device, lambda: session.step(tokens[-1]))
        tokens.append(token)
        decode_s.append(seconds)
    return session.reply(tokens, tokens[-1] in stops, decode_s), session


def _stop_ids(bound: Bound, given: Iterable[int] | None) -> frozenset[int]:
    if given is not None:
        return frozenset(given)
    default = bound.model.generation_config.eos_token_id
    if default is None:
        return frozenset()
    return frozenset([default] if isinstance(default, int) else default)


def _split(prompt: Prompt, protocol: Protocol) -> int:
    """How many columns are prefilled before packing: never less than all visual ones, and at least one."""
    if protocol == "paper":
        return prompt.length
    if protocol == "context" and prompt.visual_end:
        return prompt.visual_end
    return max(1, prompt.visual_end, prompt.length - 1)


class Session:
    """One prefilled and packed request: decodes from it, and scores any answer against it.

    Usable while the method is bound. first_logits: [V], for the first answer token.
    """

    def __init__(self, bound: Bound, inputs: Mapping[str, Any], protocol: Protocol = "context") -> None:
        """Prefill, pack, and run what is left of the prompt; see `answer` for the arguments and errors."""
        if protocol not in get_args(Protocol):
            raise UserError(f"Unknown protocol {protocol!r}; known protocols: {', '.join(get_args(Protocol))}.")
        self.bound, self.protocol = bound, protocol
        self.prompt = bound.adapter.prompt(bound.model, inputs)
        if self.prompt.batch != 1 or self.prompt.padded:
            raise UserError(
                f"answer takes one request without padding, but these inputs hold {self.prompt.batch} rows"
                f"{' with padding' if self.prompt.padded else ''}; give the requests one by one."
            )
        self._inputs = inputs
        whole_s, self.question_s = self._prefill()
        stats = self.cache.stats if isinstance(self.cache, RequestCache) else None
        self._stats = stats
        self.prefill_s = whole_s - (stats.search_s + stats.pack_s if stats else 0.0)

    def _prefill(self) -> tuple[float, float]:
        """Run the prompt into a new cache; seconds before packing, its own included, and after it."""
        bound, inputs, split = self.bound, self._inputs, _split(self.prompt, self.protocol)
        self.cache = bound.new_cache(inputs)
        prefill, question = first_columns(bound.adapter, bound.model, inputs, split), inputs["input_ids"][:, split:]
        logits, whole_s = timed(bound.device, lambda: self._forward(**prefill))
        question_s = 0.0
        if split < self.prompt.length:
            logits, question_s = timed(bound.device, lambda: self._forward(input_ids=question))
        self.first_logits = logits[-1]
        return whole_s, question_s

    @torch.no_grad()
    def _forward(self, keep: int = 1, **inputs: Any) -> Tensor:
        """Logits [keep, V] float32 of the last `keep` of the next tokens."""
        start, device = self.cache.get_seq_length(), self.bound.device
        positions = self.prompt.position_ids(start, start + inputs["input_ids"].shape[1])
        if positions is not None:
            inputs["position_ids"] = positions.to(device)
        inputs[self.bound.cache_keyword] = self.cache
        return self.bound.model(**inputs, use_cache=True, logits_to_keep=keep).logits[0].float()

    def step(self, token: int) -> int:
        """Run one more answer token and return the most likely next one."""
        return int(self._forward(input_ids=torch.tensor([[token]], device=self.bound.device))[-1].argmax())

    def logits(self, answer_tokens: Sequence[int]) -> Tensor:
        """Next-token logits along a given answer of n tokens, teacher-forced: float32 [n, V].

        Row i predicts answer_tokens[i] from the prompt and the tokens before it, all of them read from this cache: it
        is cropped back to the prompt, or filled again where it cannot be cropped, and the answer runs in one pass.
        Under `paper` row 0 is the full-precision one.
        """
        self._rewind()
        if len(answer_tokens) < 2:
            return self.first_logits[None][: len(answer_tokens)]
        ids = torch.tensor([list(answer_tokens[:-1])], device=self.bound.device)
        return torch.cat([self.first_logits[None], self._forward(keep=ids.shape[1], input_ids=ids)])

    def _rewind(self) -> None:
        extra = self.cache.get_seq_length() - self.prompt.length
        if extra and not all(layer.is_croppable for layer in self.cache.layers):
            self._prefill()
        else:
            self.cache.crop(-extra)

    def reply(self, tokens: list[int], stopped: bool, decode_s: list[float]) -> Reply:
        """Put together what is known after an answer was decoded."""
        stats, kv, visual = self._stats, kv_bytes(self.cache), int(self.prompt.visual.sum())
        packed = self.cache if isinstance(self.cache, RequestCache) else None
        return Reply(
            protocol=self.protocol,
            tokens=tokens,
            stopped=stopped,
            search_s=stats.search_s if stats else 0.0,
            pack_s=stats.pack_s if stats else 0.0,
            prefill_s=self.prefill_s,
            question_s=self.question_s,
            decode_s=decode_s,
            kv=kv,
            kv_predicted=packed.predicted_nbytes() if packed else kv.total,
            bits=stats.bits if stats else {},
            average_bits=visual_bits(self.cache, visual),
            plan=stats.plan if stats else None,
            prompt_tokens=self.prompt.length,
            visual_tokens=visual,
        )
