"""What `windowquant sensitivity` does with its arguments."""

from collections.abc import Sequence
from pathlib import Path

from windowquant.calibration import FILE_NAME, Calibration
from windowquant.harness.command import composed
from windowquant.harness.loading import embedded_names, find, folder_of
from windowquant.harness.settings import ModelSettings, group_settings
from windowquant.report.figure_sensitivity import sensitivity_figure
from windowquant.report.save import save_figure


def sensitivity_command(models: Sequence[str], output: Path) -> None:
    """Draw the calibrated sensitivities of the named models, by default of all embedded ones; prints where it is.

    A model is a name in `conf/model`, or a folder with a calibration file.

    Raises:
        UserError: an unknown name, or a model that is not calibrated; no file is written.
    """
    names = list(dict.fromkeys(models)) or embedded_names()
    values = {_label(name): Calibration.load(calibration_file(name)).values for name in names}
    stand_ins = [name for name in names if name in embedded_names()]
    title = "Layer sensitivities" + (" (mini: small stand-ins, not the paper's models)" if stand_ins else "")
    save_figure(sensitivity_figure(title, values), output)
    print(output)


def calibration_file(name: str) -> Path:
    """Where the calibration of a model lies, whether it is there or not; UserError for an unknown name."""
    if Path(name).is_dir():
        return Path(name) / FILE_NAME
    model = group_settings(ModelSettings, "model", dict(composed("run", [f"model={name}"]).model))
    if model.calibration is not None:
        return Path(model.calibration)
    return Path(folder_of(find(model.pretrained, model.revision))) / FILE_NAME


def _label(name: str) -> str:
    return Path(name).name or name
