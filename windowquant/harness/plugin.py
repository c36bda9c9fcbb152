"""Entry point of lmms-eval's plug-in group `lmms_eval.models`."""

from lmms_eval.models.registry_v2 import ModelManifest

manifest = ModelManifest(model_id="windowquant", chat_class_path="windowquant.harness.lmms_model.WindowQuantModel")
