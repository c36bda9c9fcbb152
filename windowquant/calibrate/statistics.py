"""Statistics of a model's queries, keys and values, measured once on a few prompts and kept in a file."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from windowquant.calibrate.clips import DRAWN, DrawnAttention
from windowquant.calibrate.origin import Origin, model_name, run_samples
from windowquant.calibrate.states import States, watch_states
from windowquant.errors import UserError
from windowquant.models import Prompt

FILE_NAME = "windowquant_calibration.safetensors"
_ORIGIN = "origin"


class Reducer(Protocol):
    """Takes in the states of every layer and prompt, and makes of them what a method is calibrated with."""

    def seen(self, layer: int, states: States) -> None:
        """Take in one layer's states of one prompt."""

    def tensors(self) -> dict[str, Tensor]:
        """What came out, by name, on the CPU; the first dimension is the layer."""


class Ranges:
    """Least and largest value of each channel over all tokens: `<states>.low` and `<states>.high`, float32 [L, H, D].

    <states> is query (Hq heads instead of H), key, value or unrotated_key, see `States`.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[int, tuple[Tensor, Tensor]]] = {}

    def seen(self, layer: int, states: States) -> None:
        for name, x in vars(states).items():
            if len(x) == 0:
                continue
            low, high = (end.float().cpu() for end in torch.aminmax(x, dim=0))
            layers = self._found.setdefault(name, {})
            if layer in layers:
                low, high = torch.minimum(low, layers[layer][0]), torch.maximum(high, layers[layer][1])
            layers[layer] = low, high

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{end}": torch.stack([layers[index][which] for index in sorted(layers)])
            for name, layers in self._found.items()
            for which, end in enumerate(("low", "high"))
        }


class Drawn:
    """Some tokens of each prompt as they are: `<states>.drawn`, float16 [L, n, heads, D], see `States`, and of which
    prompt each one is: `sample.drawn`, int32 [L, n].

    per_prompt: how many, evenly spread over the prompt (all of them where it has fewer). A prompt of several rows
    counts as one, so give one row at a time.
    """

    def __init__(self, per_prompt: int = 16) -> None:
        self._per_prompt = per_prompt
        self._found: dict[str, dict[int, list[Tensor]]] = {}

    def seen(self, layer: int, states: States) -> None:
        count = len(states.value)
        picked = torch.linspace(0, count - 1, min(count, self._per_prompt)).round().long()
        for name, x in vars(states).items():
            self._add(name, layer, x[picked.to(x.device)].half().cpu())
        samples = len(self._found.get("sample", {}).get(layer, []))
        self._add("sample", layer, torch.full((len(picked),), samples, dtype=torch.int32))

    def _add(self, name: str, layer: int, x: Tensor) -> None:
        self._found.setdefault(name, {}).setdefault(layer, []).append(x)

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.drawn": torch.stack([torch.cat(layers[index]) for index in sorted(layers)])
            for name, layers in self._found.items()
        }


@dataclass(frozen=True, eq=False)
class Statistics:
    """What was measured, tensors [L, ...] by name (see the reducers), and of which model and prompts it tells."""

    origin: Origin
    tensors: Mapping[str, Tensor]

    def peak(self, states: str) -> Tensor:
        """Largest absolute value of each channel of these states (see `Ranges`): float32 [L, H, D]."""
        return torch.maximum(self.tensors[f"{states}.low"].abs(), self.tensors[f"{states}.high"].abs())

    def drawn(self, layer: int) -> DrawnAttention:
        """A layer's drawn tokens (see `Drawn`); UserError for a file of a version that drew no queries."""
        try:
            return DrawnAttention(*(self.tensors[f"{name}.drawn"][layer] for name in DRAWN))
        except KeyError:
            raise UserError(
                "The statistics file holds no drawn queries to search clips with; make it again with "
                "scripts/calibrate.py."
            ) from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write safetensors with the origin as JSON in its metadata; the file appears whole or not at all."""
        target = Path(path)
        temporary = target.with_name(target.name + ".tmp")
        save_file(dict(self.tensors), temporary, metadata={_ORIGIN: json.dumps(asdict(self.origin))})
        temporary.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Statistics":
        """Read what `save` wrote; UserError if it is missing or something else."""
        try:
            with safe_open(path, framework="pt") as file:
                found = json.loads((file.metadata() or {})[_ORIGIN])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            origin: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
            return cls(Origin(**origin), tensors)
        except FileNotFoundError:
            raise UserError(f"There is no statistics file {path}; make one with scripts/calibrate.py.") from None
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path} is not a statistics file ({error}); make it with scripts/calibrate.py.") from None


def load_statistics(model: PreTrainedModel, path: str | os.PathLike[str] | None = None) -> Statistics:
    """The statistics of a loaded model, from `path` or from the file beside its weights.

    Raises UserError if there is none, or if it is of another model or of another state of its weights.
    """
    found = Path(path) if path is not None else Path(model_name(model)) / FILE_NAME
    statistics = Statistics.load(found)
    statistics.origin.check(model, found)
    return statistics


def measure_statistics(
    model: PreTrainedModel, samples: Iterable[Mapping[str, Any]], reducers: Sequence[Reducer] = ()
) -> Statistics:
    """Prefill each sample (processor outputs, on the model's device) and reduce what is seen.

    By default with `Ranges` and `Drawn`. Raises UserError without a sample.
    """
    reducers = reducers or (Ranges(), Drawn())

    def watch(prompt: Prompt, undo: ExitStack) -> None:
        def seen(layer: int, states: States) -> None:
            for reducer in reducers:
                reducer.seen(layer, states)

        watch_states(model, prompt, seen, undo)

    origin = run_samples(model, samples, watch)
    return Statistics(origin, {name: x for reducer in reducers for name, x in reducer.tensors().items()})
