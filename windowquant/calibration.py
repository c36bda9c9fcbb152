"""Layer sensitivities of a model (paper, equation 9), measured once on a few samples and kept in a file."""

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from windowquant.calibrate.origin import Origin, model_name, run_samples
from windowquant.core.sensitivity import hidden_similarity
from windowquant.errors import UserError
from windowquant.models import Prompt, adapter_for
from windowquant.online import watch_attention

FILE_NAME = "windowquant_calibration.json"


@dataclass(frozen=True, kw_only=True)
class Calibration(Origin):
    """Sensitivities of one model and where they come from. values: s_l per layer [L]."""

    values: tuple[float, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; the file appears whole or not at all."""
        target = Path(path)
        temporary = target.with_name(target.name + ".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        temporary.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Calibration":
        """Read what `save` wrote; UserError if it is missing or something else."""
        try:
            found = json.loads(Path(path).read_text())
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
            return cls(**fields)
        except FileNotFoundError:
            raise UserError(f"There is no calibration file {path}; make one with scripts/calibrate.py.") from None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"{path} is not a calibration file ({error}); make it again.") from None


def load_for(model: PreTrainedModel, path: str | os.PathLike[str] | None = None) -> Calibration:
    """The calibration of a loaded model, from `path` or from the file beside its weights.

    Raises UserError if there is none, or if it is of another model or of another state of its weights.
    """
    if path is None:
        folder = Path(model_name(model))
        if not (folder / FILE_NAME).is_file():
            raise UserError(
                f"There is no {FILE_NAME} in {folder}; calibrate the model first, or set sensitivity to online, to a "
                "file, or to one number per layer."
            )
        path = folder / FILE_NAME
    calibration = Calibration.load(path)
    calibration.check(model, path)
    return calibration


def calibrate_sensitivity(model: PreTrainedModel, samples: Iterable[Mapping[str, Any]]) -> Calibration:
    """Run each sample's prefill (processor outputs, on the model's device) and average s_l over the samples.

    Within a sample s_l is the mean over all its tokens, padding left out. Raises UserError without a sample.
    """
    layers = adapter_for(model).decoder_layers(model)
    totals = [0.0] * len(layers)

    def watch(prompt: Prompt, undo: ExitStack) -> None:
        attended = prompt.attended.flatten()

        def seen(index: int, h_in: Tensor, h_out: Tensor, kwargs: Mapping[str, Any]) -> None:
            totals[index] += hidden_similarity(h_in.flatten(0, 1), h_out.flatten(0, 1), attended.to(h_in.device))

        watch_attention(layers, seen, undo)

    origin = run_samples(model, samples, watch)
    return Calibration(**asdict(origin), values=tuple(total / origin.samples for total in totals))
