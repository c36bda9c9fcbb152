"""WindowQuant (https://arxiv.org/abs/2605.02262): one bit-width per window, by its similarity to the question."""

from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import Tensor
from transformers import PreTrainedModel

from windowquant.calibration import load_for
from windowquant.core.search import majority_vote, search_plan
from windowquant.core.similarity import Metric, Scaling, window_scores
from windowquant.core.thresholds import check_alpha
from windowquant.method import Method
from windowquant.models import Embeddings, Prompt


@dataclass(frozen=True)
class WindowQuant(Method):
    """The paper's method; defaults are the paper's, except that it does not say how scores are scaled.

    alpha: width of the INT4 band between the two thresholds (equations 10 and 11), finite and >= 0. metric, scaling:
    of the window scores, see `windowquant.core.similarity`. sensitivity: where each layer's s_l comes from:
    "calibrated" (the file beside the checkpoint), "online" (the request's own prefill), the path of a calibration file,
    or one number per layer.
    """

    alpha: float = 2.0
    metric: Metric = "cosine"
    scaling: Scaling = "minmax"
    sensitivity: str | tuple[float, ...] = "calibrated"

    name: ClassVar[str] = "windowquant"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self.alpha)
        self._check("metric", get_args(Metric))
        self._check("scaling", get_args(Scaling))
        if not isinstance(self.sensitivity, str):
            object.__setattr__(self, "sensitivity", tuple(float(value) for value in self.sensitivity))

    def sensitivity_of(self, model: PreTrainedModel) -> tuple[float, ...] | None:
        if not isinstance(self.sensitivity, str):
            return self.sensitivity
        if self.sensitivity == "online":
            return None
        return load_for(model, None if self.sensitivity == "calibrated" else self.sensitivity).values

    def scores(self, embeddings: Embeddings) -> list[Tensor] | None:
        """Similarity of each window to the whole prompt's text (equation 8)."""
        return [
            window_scores(visual, text, self.window_size, self.metric, self.scaling)
            if len(visual)
            else visual.new_zeros(0).float()
            for visual, text in zip(embeddings.visual, embeddings.text, strict=True)
        ]

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        """Algorithm 1, and the vote among the requests of a batch."""
        assert scores is not None
        return majority_vote([search_plan(row.cpu(), sensitivity, self.alpha) for row in scores])
