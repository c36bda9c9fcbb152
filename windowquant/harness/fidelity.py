"""How far a method's next-token distribution is from FP16's, along FP16's own answer."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from windowquant.errors import UserError
from windowquant.harness.files import write_atomically


def divergence(reference: torch.Tensor, logits: torch.Tensor) -> tuple[float, float]:
    """Mean KL divergence from FP16 and top-1 agreement over one answer.

    Args:
        reference: float32 [n, V] log-probabilities of FP16 before each answer token.
        logits: float [n, V] of the method at the same positions.

    Returns:
        (mean over n of KL(FP16 || method) in nats, share of n where both rank the same token first).
    """
    # float64: what 4 bits cost on some models is near float32's rounding
    own = torch.log_softmax(reference.double(), -1)
    other = torch.log_softmax(logits.to(reference.device).double(), -1)
    kl = (own.exp() * (own - other)).nan_to_num(0.0).sum(-1)  # 0 * (-inf - x) counts as 0
    agree = (own.argmax(-1) == other.argmax(-1)).double()
    return kl.mean().item(), agree.mean().item()


def save_reference(answers: Mapping[int, tuple[list[int], torch.Tensor]], path: Path) -> None:
    """Write FP16's answers: per document its tokens (int32 [n]) and log-probabilities (float32 [n, V])."""
    tensors = {}
    for doc, (tokens, log_probs) in answers.items():
        tensors[f"{doc}.tokens"] = torch.tensor(tokens, dtype=torch.int32)
        tensors[f"{doc}.log_probs"] = log_probs.contiguous().cpu()
    write_atomically(path, lambda temporary: save_file(tensors, temporary))


class Reference:
    """FP16's answers, read one document at a time."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path} is missing: run method=fp16 with the same settings and force=true.")
        self._file = safe_open(path, framework="pt")
        self._documents = {int(key.split(".")[0]) for key in self._file.keys()}  # noqa: SIM118 - not a mapping

    def documents(self) -> Iterable[int]:
        return sorted(self._documents)

    def answer(self, doc: int) -> tuple[list[int], torch.Tensor] | None:
        """(tokens, log-probabilities float32 [n, V]) of a document, None where FP16 has no answer for it."""
        if doc not in self._documents:
            return None
        return self._file.get_tensor(f"{doc}.tokens").tolist(), self._file.get_tensor(f"{doc}.log_probs")
