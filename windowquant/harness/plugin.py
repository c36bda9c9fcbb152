"""Entry point that makes the model known to lmms-eval."""

import sys
from typing import Any

_MODEL = "windowquant.harness.lmms_model.WindowQuantModel"
_COMMAND_LINE_MODEL = "windowquant.harness.lmms_command.CommandLineModel"


def manifest() -> Any:
    """Names the model class. The import waits: lmms-eval loads this module while it is itself being imported."""
    from lmms_eval.models.registry_v2 import ModelManifest

    path = _COMMAND_LINE_MODEL if _from_command_line() else _MODEL
    return ModelManifest(model_id="windowquant", chat_class_path=path)


def _from_command_line() -> bool:
    """Whether this process is lmms-eval's command, by its script or as `python -m lmms_eval`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return "lmms_eval.__main__" in sys.modules or (spec is not None and spec.name == "lmms_eval.__main__")
