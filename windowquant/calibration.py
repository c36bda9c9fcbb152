"""Layer sensitivities of a model (paper, equation 9), measured once on a few samples and kept in a file."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.core.sensitivity import hidden_similarity
from windowquant.errors import UserError
from windowquant.models import adapter_for
from windowquant.online import watch_attention

FILE_NAME = "windowquant_calibration.json"
_TOLERANCE = 1e-3  # of a weight norm: well above the rounding of a 16-bit load, below what training changes


@dataclass(frozen=True)
class Calibration:
    """Sensitivities of one model and where they come from.

    model: its name or path when calibrated. structure: sha256 of the language model's shape. weights: mean absolute
    query-projection weight of each layer, which tells one training state from another, whatever dtype it is loaded in.
    samples: how many prompts. sample_hash: sha256 of their token ids. values: s_l per layer [L].
    """

    model: str
    structure: str
    weights: tuple[float, ...]
    samples: int
    sample_hash: str
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

    def check(self, model: PreTrainedModel, path: str | os.PathLike[str]) -> None:
        """Raise UserError, naming `path`, unless this was measured on `model` as it is now."""
        structure, weights = fingerprint(model)
        if structure != self.structure:
            raise UserError(
                f"{path} was made for another model ({self.model}); calibrate {_name(model)} and use its own file."
            )
        if not all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(weights, self.weights, strict=True)):
            raise UserError(f"{path} is stale: the weights of {_name(model)} have changed since; calibrate it again.")


def _name(model: PreTrainedModel) -> str:
    return str(getattr(model.config, "_name_or_path", "") or model.config.model_type)


def fingerprint(model: PreTrainedModel) -> tuple[str, tuple[float, ...]]:
    """(structure, weights) of a model's language model; see `Calibration`."""
    adapter = adapter_for(model)
    config = adapter.text_config(model)
    keys = (
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    shape = {key: getattr(config, key, None) for key in keys}
    structure = hashlib.sha256(json.dumps([model.config.model_type, shape]).encode()).hexdigest()
    layers = adapter.decoder_layers(model)
    weights = tuple(float(layer.self_attn.q_proj.weight.detach().float().abs().mean()) for layer in layers)
    return structure, weights


def load_for(model: PreTrainedModel, path: str | os.PathLike[str] | None = None) -> Calibration:
    """The calibration of a loaded model, from `path` or from the file beside its weights.

    Raises UserError if there is none, or if it is of another model or of another state of its weights.
    """
    if path is None:
        folder = Path(_name(model))
        if not (folder / FILE_NAME).is_file():
            raise UserError(
                f"There is no {FILE_NAME} in {folder}; calibrate the model first, or set sensitivity to online, to a "
                "file, or to one number per layer."
            )
        path = folder / FILE_NAME
    calibration = Calibration.load(path)
    calibration.check(model, path)
    return calibration


@torch.no_grad()
def calibrate_sensitivity(model: PreTrainedModel, samples: Iterable[Mapping[str, Any]]) -> Calibration:
    """Run each sample's prefill (processor outputs, on the model's device) and average s_l over the samples.

    Within a sample s_l is the mean over all its tokens, padding left out. Raises UserError without a sample.
    """
    adapter = adapter_for(model)
    layers = adapter.decoder_layers(model)
    totals, digest, count = [0.0] * len(layers), hashlib.sha256(), 0
    for sample in samples:
        prompt = adapter.prompt(model, sample)
        digest.update(prompt.input_ids.numpy().tobytes())
        for index, value in enumerate(_sensitivities(model, layers, sample, prompt.attended.flatten())):
            totals[index] += value
        count += 1
    if count == 0:
        raise UserError("There is no sample to calibrate on; give at least one prompt.")
    structure, weights = fingerprint(model)
    values = tuple(total / count for total in totals)
    return Calibration(_name(model), structure, weights, count, digest.hexdigest(), values)


def _sensitivities(
    model: PreTrainedModel, layers: list[Any], sample: Mapping[str, Any], attended: Tensor
) -> list[float]:
    found = [0.0] * len(layers)

    def seen(index: int, h_in: Tensor, h_out: Tensor, kwargs: Mapping[str, Any]) -> None:
        found[index] = hidden_similarity(h_in.flatten(0, 1), h_out.flatten(0, 1), attended.to(h_in.device))

    with ExitStack() as undo:
        watch_attention(layers, seen, undo)
        model(**sample, use_cache=False, logits_to_keep=1)
    return found
