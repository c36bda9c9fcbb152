"""One run over the samples' prompts for every kind of calibration, and where their files lie."""

import os
from collections.abc import Iterable
from pathlib import Path

from transformers import BatchFeature, PreTrainedModel

from windowquant.calibrate.statistics import measure_statistics
from windowquant.calibration import calibrate_sensitivity


def statistics_beside(calibration: str | os.PathLike[str]) -> Path:
    """The statistics file that belongs to a file of layer sensitivities: the same name, ending in .safetensors."""
    return Path(calibration).with_suffix(".safetensors")


def calibrate_all(
    model: PreTrainedModel, samples: Iterable[BatchFeature], path: str | os.PathLike[str]
) -> tuple[Path, Path]:
    """Measure sensitivities and statistics on the samples (processor outputs, on the CPU) and write both files.

    Returns (`path`, the statistics file beside it); their folder is made if need be. Raises UserError without a sample.
    """
    device, dtype = model.device, model.dtype
    kept = list(samples)
    sensitivity = calibrate_sensitivity(model, (each.to(device, dtype) for each in kept))
    statistics = measure_statistics(model, (each.to(device, dtype) for each in kept))
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    sensitivity.save(target)
    statistics.save(statistics_beside(target))
    return target, statistics_beside(target)
