"""Where a calibration comes from: which weights, which prompts; and whether a loaded model is still that one."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from windowquant.errors import UserError
from windowquant.models import Prompt, adapter_for

_TOLERANCE = 1e-3  # of a weight norm: well above the rounding of a 16-bit load, below what training changes

Watch = Callable[[Prompt, ExitStack], None]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Of which model, in which state, and of which prompts a calibration tells.

    model: its name or path when calibrated. revision: the hub commit it was loaded from, None for a local folder.
    structure: sha256 of the language model's shape. weights: mean absolute query-projection weight of each layer, which
    tells one training state from another, whatever dtype it is loaded in. samples: how many prompts. sample_hash:
    sha256 of their token ids.
    """

    model: str
    revision: str | None = None
    structure: str
    weights: tuple[float, ...]
    samples: int
    sample_hash: str

    def check(self, model: PreTrainedModel, path: str | os.PathLike[str]) -> None:
        """Raise UserError, naming the file `path`, unless this was measured on `model` as it is now."""
        structure, weights = fingerprint(model)
        if structure != self.structure:
            raise UserError(
                f"{path} was made for another model ({self.model}); calibrate {model_name(model)} and use its own file."
            )
        if not all(math.isclose(a, b, rel_tol=_TOLERANCE) for a, b in zip(weights, self.weights, strict=True)):
            raise UserError(
                f"{path} is stale: the weights of {model_name(model)} have changed since; calibrate it again."
            )


def model_name(model: PreTrainedModel) -> str:
    """The folder or hub id that a model was loaded from; its type if it was built in memory."""
    return str(getattr(model.config, "_name_or_path", "") or model.config.model_type)


def fingerprint(model: PreTrainedModel) -> tuple[str, tuple[float, ...]]:
    """(structure, weights) of a model's language model; see `Origin`."""
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


@torch.no_grad()
def run_samples(model: PreTrainedModel, samples: Iterable[Mapping[str, Any]], watch: Watch) -> Origin:
    """Prefill each sample (processor outputs, on the model's device) while watched, and say what was run.

    watch(prompt, undo): installs hooks on the model for that prompt; they are removed when `undo` closes, after its
    prefill. Raises UserError without a sample.
    """
    adapter, digest, count = adapter_for(model), hashlib.sha256(), 0
    for sample in samples:
        prompt = adapter.prompt(model, sample)
        digest.update(prompt.input_ids.numpy().tobytes())
        with ExitStack() as undo:
            watch(prompt, undo)
            model(**sample, use_cache=False, logits_to_keep=1)
        count += 1
    if count == 0:
        raise UserError("There is no sample to calibrate on; give at least one prompt.")
    structure, weights = fingerprint(model)
    return Origin(
        model=model_name(model),
        revision=getattr(model.config, "_commit_hash", None),
        structure=structure,
        weights=weights,
        samples=count,
        sample_hash=digest.hexdigest(),
    )
