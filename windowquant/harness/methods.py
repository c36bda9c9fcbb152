"""Methods from configuration values, with types checked before the method's own code sees them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from windowquant.calibrate.everything import statistics_beside
from windowquant.calibration import FILE_NAME, Calibration
from windowquant.errors import UserError
from windowquant.method import Method, get_method

CALIBRATED = "calibrated"


def build_method(name: str, params: Mapping[str, Any], calibration: str | None = None) -> Method:
    """The method called `name` with the given hyper-parameters.

    Args:
        calibration: file of the model's layer sensitivities, for a method that is to use calibrated ones; its
            statistics lie beside it.

    Raises:
        UserError: unknown name (the known ones are listed), unknown hyper-parameter, wrong type, or out of range.
    """
    defaults = get_method(name)
    for param, value in params.items():
        _check_type(f"method.{param}", value, getattr(defaults, param, None))
    if calibration is not None:
        params = {**params, **_located(defaults, params, calibration)}
    return get_method(name, **params)


def _located(defaults: Method, params: Mapping[str, Any], calibration: str) -> dict[str, str]:
    """The calibration files' paths, in the hyper-parameters that ask for them."""
    files = {"sensitivity": calibration, "statistics": str(statistics_beside(calibration))}
    return {
        field: path
        for field, path in files.items()
        if getattr(defaults, field, None) == params.get(field, CALIBRATED) == CALIBRATED
    }


def calibration_of(method: Method, checkpoint: str) -> list[float] | str | None:
    """What a method will use of a checkpoint's calibration, for telling runs apart; None for a method that needs none.

    Layer sensitivities themselves; of statistics, the hash of their file.

    Raises:
        UserError: the file is missing or is something else (before any weight is loaded).
    """
    statistics = getattr(method, "statistics", None)
    if statistics is not None and getattr(method, "needs_statistics", True):
        return _statistics_hash(statistics, checkpoint)
    return _sensitivities(getattr(method, "sensitivity", "online"), checkpoint)


def _statistics_hash(source: str, checkpoint: str) -> str:
    path = statistics_beside(Path(checkpoint) / FILE_NAME) if source == CALIBRATED else Path(source)
    if not path.is_file():
        raise UserError(f"Calibration file {path} is missing: write it with scripts/calibrate.py.")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _sensitivities(source: Any, checkpoint: str) -> list[float] | None:
    if not isinstance(source, str) or source == "online":
        return None
    path = Path(checkpoint) / FILE_NAME if source == CALIBRATED else Path(source)
    if not path.is_file():
        raise UserError(
            f"Calibration file {path} is missing: write it with scripts/calibrate.py or set method.sensitivity=online."
        )
    return list(Calibration.load(path).values)


def _check_type(field: str, value: Any, default: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, bool):
        return  # the method's own check suffices
    if isinstance(default, int) and not (number and isinstance(value, int)):
        raise UserError(f"{field} is {value!r}: give a whole number.")
    if isinstance(default, float) and not number:
        raise UserError(f"{field} is {value!r}: give a number.")
