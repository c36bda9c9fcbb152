"""What happens to each answer of a run: kept for the record, and scored for fidelity while its cache still exists."""

from dataclasses import dataclass, field

import torch

from windowquant.harness.engine import Answer
from windowquant.harness.fidelity import Reference, divergence
from windowquant.harness.video import VideoError
from windowquant.protocols import Reply


@dataclass
class Collector:
    """Observer of an `EvaluatedModel`.

    Args:
        reference: FP16's answers on the same inputs; None for the FP16 run itself, whose answers are kept instead.
        limit: fidelity is measured on that many documents; None is all.
    """

    reference: Reference | None
    limit: int | None = None
    replies: dict[int, Reply] = field(default_factory=dict)
    vision_s: dict[int, float] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    divergences: dict[int, tuple[float, float]] = field(default_factory=dict)
    answers: dict[int, tuple[list[int], torch.Tensor]] = field(default_factory=dict)

    def __call__(self, doc: int, answer: Answer | VideoError) -> None:
        if isinstance(answer, VideoError):
            self.errors[doc] = str(answer)
            return
        self.replies[doc] = answer.reply
        self.vision_s[doc] = answer.vision_s
        if self.limit is None or len(self.divergences) < self.limit:
            self._compare(doc, answer)

    def _compare(self, doc: int, answer: Answer) -> None:
        known = self._own(doc, answer) if self.reference is None else self.reference.answer(doc)
        if known is None or not known[0]:
            return
        tokens, log_probs = known
        logits = log_probs if self.reference is None else answer.session.logits(tokens)
        self.divergences[doc] = divergence(log_probs, logits)

    def _own(self, doc: int, answer: Answer) -> tuple[list[int], torch.Tensor] | None:
        """FP16's own answer, kept as the reference of the others."""
        tokens = answer.reply.tokens
        if not tokens:
            return None
        log_probs = torch.log_softmax(answer.session.logits(tokens).float(), -1).cpu()
        self.answers[doc] = (tokens, log_probs)
        return self.answers[doc]
