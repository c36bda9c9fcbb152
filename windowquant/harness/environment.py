"""What has to be true of the process before lmms-eval is imported."""

import importlib
import os
from pathlib import Path


def prepare(hf_home: Path | None) -> None:
    """Point lmms-eval's task code at a data folder and keep it off the network; call before importing `lmms_eval`.

    lmms-eval's task utilities look for videos under `HF_HOME` and read it when they are executed. Model downloads keep
    their usual cache, so a checkpoint is not fetched again into every data folder.

    Args:
        hf_home: folder laid out as lmms-eval expects `HF_HOME` to be; None leaves the user's own (hub data).
    """
    usual = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    if hf_home is not None:
        os.environ.setdefault("HF_HUB_CACHE", str(usual / "hub"))
        os.environ.setdefault("HF_TOKEN_PATH", str(usual / "token"))
        os.environ["HF_HOME"] = str(hf_home)
    else:
        os.environ["HF_HOME"] = str(usual)  # lmms-eval's NExT-QA code insists on the variable
    _quieten()


def _quieten() -> None:
    """No corpora are needed for multiple choice, yet the NExT-QA code downloads them on every load; and less log."""
    setattr(importlib.import_module("nltk"), "download", _no_download)  # noqa: B010 - a dependency of lmms-eval
    logger = importlib.import_module("lmms_eval.utils").eval_logger
    logger.remove()


def _no_download(*_: object, **__: object) -> bool:
    return False
