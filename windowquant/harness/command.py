"""Hydra commands that answer bad input with one sentence on stderr and exit code 2."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from hydra.utils import get_method
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from windowquant.errors import UserError

BAD_PATH = (FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)
BAD_INPUT = (UserError, HydraException, OmegaConfBaseException, *BAD_PATH)
CONF = Path(__file__).resolve().parents[2] / "conf"


def command(config: str, task: str) -> None:
    """Compose `conf/<config>.yaml` with the command line's overrides and run `task` on it, once or as a multirun.

    `task` is the dotted name of a function of the composed configuration. It is imported only then, so that a misspelt
    name is told without waiting for torch and lmms-eval.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach `main` below instead of being printed with a traceback

    def guarded(cfg: DictConfig) -> None:
        try:
            get_method(task)(cfg)
        except BAD_INPUT as error:  # here, because Hydra would add a line of its own
            _stop(sentence(error))

    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=config)(guarded)()
    except BAD_INPUT as error:
        _stop(sentence(error))
    except KeyboardInterrupt:
        print("Interrupted: the same command continues where it stopped.", file=sys.stderr)
        sys.exit(130)


def composed(config: str, overrides: Sequence[str]) -> DictConfig:
    """`conf/<config>.yaml` with Hydra overrides, for a command line that is not Hydra's own.

    Raises:
        UserError: there is no `conf/`, which only a clone of the repository has.
        HydraException, OmegaConfBaseException: an override that cannot be; see `sentence`.
    """
    if not CONF.is_dir():
        raise UserError(
            f"There are no configurations in {CONF}: install from a clone of the repository (pip install -e)."
        )
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(config, list(overrides))


def _stop(complaint: str) -> None:
    print(complaint, file=sys.stderr)
    sys.exit(2)


def sentence(error: Exception) -> str:
    """One line about wrong input, or a configuration that cannot be composed."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, BAD_PATH) and error.filename:
        return f"{error.filename} cannot be used ({error.strerror}): name another, or mend its permissions."
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, name = str(error.missing_cfg_file).rsplit("/", 1)
        return f"Unknown {group} '{name}': the known ones are {', '.join(error.options)}."
    if isinstance(error.__cause__, ConfigAttributeError | ConfigKeyError):
        return _unknown_setting(error.__cause__)
    reason = str(error.__cause__ or error).strip().splitlines()[0]
    return f"Configuration: {reason}."


def _unknown_setting(error: OmegaConfBaseException) -> str:
    """For a field that is not there: the group or file where it was looked for, and the fields of that."""
    where, _, key = str(error.full_key).rpartition(".")
    known = [str(name) for name in error.parent_node or () if name != "hydra"]
    return f"{where or 'The configuration'} has no setting '{key}': it has {', '.join(known)}."
