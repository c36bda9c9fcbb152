"""WindowQuant (https://arxiv.org/abs/2605.02262): one bit-width per window, by its similarity to the question."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor
from transformers import PreTrainedModel

from windowquant.cache.recipe import Recipe
from windowquant.calibration import load_for
from windowquant.core.budget import alpha_for, check_target
from windowquant.core.plan import BitPlan, KVShape, average_bits, check_widths, v_bits_of
from windowquant.core.quantizer import WITHIN_WINDOWS
from windowquant.core.search import PAPER_WIDTHS, majority_vote, search_plan, shuffled
from windowquant.core.similarity import Metric, Scaling, window_scores
from windowquant.core.thresholds import check_alpha
from windowquant.errors import UserError
from windowquant.kernels import get_window_means
from windowquant.method import Status
from windowquant.models import Embeddings, Prompt
from windowquant.window_method import WindowMethod

Search = Literal["window", "random", "token"]


@dataclass(frozen=True)
class WindowQuant(WindowMethod):
    """The paper's method; defaults are the paper's, except that it does not say how scores are scaled.

    alpha: width of the INT4 band between the two thresholds (equations 10 and 11), finite and >= 0.
    target_bits: instead of a fixed alpha, the budget of a request: the most bits an element of its windows may take on
        average, scales and offsets included (`core.plan.average_bits`; of a batch, of the voted plan). alpha is then
        chosen for each request (`core.budget.alpha_for`; `plan.alpha` tells), and the field only breaks ties.
    metric, scaling: of the window scores, see `windowquant.core.similarity`.
    sensitivity: where each layer's s_l comes from: "calibrated" (the file beside the checkpoint), "online" (the
        request's own prefill), the path of a calibration file, or one number per layer.
    fix_first: the first window always takes the first of `widths`, as in the paper.
    search: "window" is the paper's. "random" deals each layer's bit-widths out to windows drawn at random, from `seed`
        and the prompt's tokens: the same for a request wherever it is run, another for each request and layer. "token"
        scores each token by itself; its windows are single tokens, so that window_size becomes 1 and granularity must
        not be "window_channel".
    reorder: windows of one bit-width are brought together in memory (Algorithm 2). False stores them in the video's
        order, in as many pieces as the bit-width changes.
    widths: bit-widths from the most relevant windows to the least, three or four (see `core.search.search_plan`).
    v_widths: bits of a window's V for each of `widths`, which its K has; None for the same.
    """

    alpha: float = 2.0
    target_bits: float | None = None
    metric: Metric = "cosine"
    scaling: Scaling = "minmax"
    sensitivity: str | tuple[float, ...] = "calibrated"
    fix_first: bool = True
    search: Search = "window"
    seed: int = 0
    reorder: bool = True
    widths: tuple[int, ...] = PAPER_WIDTHS
    v_widths: tuple[int, ...] | None = None

    name: ClassVar[str] = "windowquant"
    declared: ClassVar[Status] = "paper"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_alpha(self.alpha)
        check_target(self.target_bits)
        self._check("metric", get_args(Metric))
        self._check("scaling", get_args(Scaling))
        self._check("search", get_args(Search))
        self._check_flag("fix_first")
        self._check_flag("reorder")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UserError(f"seed is {self.seed!r}; give a whole number.")
        self._set("sensitivity", _sensitivity(self.sensitivity))
        self._set("widths", _whole("widths", self.widths))
        self._set("v_widths", None if self.v_widths is None else _whole("v_widths", self.v_widths))
        check_widths(self.widths, self.v_widths)
        self._check_together()

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _check_flag(self, field: str) -> None:
        if not isinstance(getattr(self, field), bool):
            raise UserError(f"{field} is {getattr(self, field)!r}; give true or false.")

    def _check_together(self) -> None:
        """Refuse options that exclude each other."""
        if self.search == "token":
            self._set("window_size", 1)
            if self.granularity == "window_channel":
                raise UserError(
                    "search is 'token', whose windows of one token would have a scale for every element at granularity "
                    "'window_channel'; set granularity to token."
                )
        if not self.reorder and self.granularity not in WITHIN_WINDOWS:
            raise UserError(
                f"reorder is false, which leaves the windows of one bit-width apart, but granularity "
                f"{self.granularity!r} has groups across them; set granularity to {' or '.join(WITHIN_WINDOWS)}."
            )
        if self.target_bits is not None and self.sensitivity == "online":
            raise UserError(
                "target_bits needs every layer's sensitivity before the prefill, which sensitivity 'online' takes from "
                "the prefill itself; set sensitivity to calibrated, to a file, or to one number per layer."
            )

    def sensitivity_of(self, model: PreTrainedModel) -> tuple[float, ...] | None:
        if not isinstance(self.sensitivity, str):
            return self.sensitivity
        if self.sensitivity == "online":
            return None
        return load_for(model, None if self.sensitivity == "calibrated" else self.sensitivity).values

    def scores(self, embeddings: Embeddings) -> list[Tensor] | None:
        """Similarity of each window to the whole prompt's text (equation 8)."""
        return [
            window_scores(visual, text, self.window_size, self.metric, self.scaling, get_window_means(visual.device))
            if len(visual)
            else visual.new_zeros(0).float()
            for visual, text in zip(embeddings.visual, embeddings.text, strict=True)
        ]

    def bits(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor) -> Tensor:
        """Algorithm 1, and the vote among the requests of a batch; then the draw, if the search is random."""
        plan = self._voted(scores, sensitivity, self.alpha)
        if self.search != "random":
            return plan
        drawn_from = f"{self.seed}:".encode() + prompt.input_ids.numpy().tobytes()
        return shuffled(plan, zlib.crc32(drawn_from), self.fix_first)

    def _voted(self, scores: list[Tensor] | None, sensitivity: Tensor, alpha: float) -> Tensor:
        assert scores is not None
        rows = [search_plan(row.cpu(), sensitivity, alpha, self.fix_first, self.widths) for row in scores]
        return majority_vote(rows)

    def plan(self, prompt: Prompt, scores: list[Tensor] | None, sensitivity: Tensor, kv: KVShape) -> BitPlan:
        """The plan at `alpha`, or at the alpha that meets `target_bits`. Raises UserError if none does."""
        assert scores is not None
        chosen = self
        if self.target_bits is not None and any(len(row) for row in scores):
            chosen = replace(self, alpha=self._alpha(scores, sensitivity, kv))
        return chosen._planned(chosen.bits(prompt, scores, sensitivity), chosen.alpha)

    def _alpha(self, scores: list[Tensor], sensitivity: Tensor, kv: KVShape) -> float:
        assert self.target_bits is not None
        v_widths = self.recipe().v_widths

        def average(alpha: float) -> float:
            k = self._voted(scores, sensitivity, alpha)
            v = v_bits_of(k, v_widths)
            return average_bits(k, v, self.window_size, True, self.granularity, kv, self.zero_point)

        return alpha_for(average, self.target_bits, self.alpha)

    def recipe(self) -> Recipe:
        v_widths = () if self.v_widths is None else tuple(zip(self.widths, self.v_widths, strict=True))
        return replace(super().recipe(), reorder=self.reorder, v_widths=v_widths)


def _sensitivity(given: Any) -> str | tuple[float, ...]:
    if isinstance(given, str):
        return given
    try:
        return tuple(float(value) for value in given)
    except (TypeError, ValueError):
        raise UserError(
            f"sensitivity is {given!r}; give calibrated, online, a calibration file, or a list of one number per layer."
        ) from None


def _whole(field: str, given: Any) -> tuple[int, ...]:
    numbers = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (None,)
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise UserError(f"{field} is {given!r}; give a list of whole numbers.")
    return numbers
