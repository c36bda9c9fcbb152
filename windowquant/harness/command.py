"""Hydra commands that answer bad input with one sentence on stderr and exit code 2."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from windowquant.errors import UserError

BAD_INPUT = (UserError, HydraException, OmegaConfBaseException)
CONF = Path(__file__).resolve().parents[2] / "conf"


def command(config: str, task: Callable[[DictConfig], object]) -> None:
    """Compose `conf/<config>.yaml` with the command line's overrides and run `task` on it, once or as a multirun."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach `main` below instead of being printed with a traceback

    def guarded(cfg: DictConfig) -> None:
        try:
            task(cfg)
        except BAD_INPUT as error:  # here, because Hydra would add a line of its own
            _stop(_sentence(error))

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(guarded)()
    except BAD_INPUT as error:
        _stop(_sentence(error))
    except KeyboardInterrupt:
        print("Interrupted: the same command continues where it stopped.", file=sys.stderr)
        sys.exit(130)


def _stop(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    sys.exit(2)


def _sentence(error: Exception) -> str:
    """One line about wrong input, or a configuration that cannot be composed."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, name = str(error.missing_cfg_file).rsplit("/", 1)
        return f"Unknown {group} '{name}': the known ones are {', '.join(error.options)}."
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    return f"Configuration: {reason}."
