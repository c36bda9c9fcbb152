"""Entry point that makes the model known to lmms-eval."""

from typing import Any


def manifest() -> Any:
    """Names the model class. The import waits: lmms-eval loads this module while it is itself being imported."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="windowquant", chat_class_path="windowquant.harness.lmms_model.WindowQuantModel")
